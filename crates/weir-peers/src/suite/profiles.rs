//! Profiles of the server's processor time for a request, beside that of the bare sockets.

use weir_load::workload::Access;

use super::{OWN, Subject, Suite, WEIR, echoed, served};
use crate::driver::Driver;
use crate::error::Outcome;
use crate::floor::Echo;
use crate::process::cpu_times;
use crate::profile::{Group, Profile, Recording};
use crate::row::{Cell, Metric, Row};
use crate::server::Transport;
use crate::weir::{Cluster, ClusterConfig};

impl Suite<'_> {
    /// Profiles reads and writes of one copy, and the owner of two.
    pub(super) fn profiles(&mut self) -> Outcome<()> {
        type Wanted = (&'static str, Access);
        let cells = vec![
            ("write-through", Access::RandRead),
            ("write-through", Access::RandWrite),
            ("write-back+1", Access::RandWrite),
        ];
        let name = |(policy, access): &Wanted| format!("profile nbd unix {policy} {access} 4k qd32");
        for wanted in self.wanted(name, cells) {
            let (policy, access) = wanted;
            let load = self.load(access, 32);
            let config = ClusterConfig::in_memory(self.workspace, Transport::Unix, policy);
            let cluster = Cluster::start(self.weir, self.workspace, &config)?;
            let echo = Echo::start(self.workspace, Transport::Unix)?;
            let weir = Subject { pids: vec![cluster.owner_pid()?], ..served(&cluster, Driver::Weir, load) };
            let rows = vec![
                self.profile(&name(&wanted), &weir)?,
                self.profile(&name(&wanted), &echoed(vec![&echo], load))?,
            ];
            self.finish(Cell { name: name(&wanted), rows }, Metric::Iops);
        }
        Ok(())
    }

    /// Records one measurement of one server. Without `perf` it distinguishes only user and system time.
    fn profile(&mut self, cell: &str, subject: &Subject<'_>) -> Outcome<Row> {
        eprintln!("{cell}: {}", subject.name);
        let pid = subject.pids[0];
        let recording = Recording::start(pid, &self.workspace.directory);
        let before = cpu_times(pid)?;
        let sample = subject.sample(cell)?;
        let after = cpu_times(pid)?;
        let (source, groups) = match recording.and_then(Recording::groups) {
            Ok((groups, samples)) => (format!("perf, {samples} samples of the processor's clock"), groups),
            Err(failure) => (format!("the kernel's clock ({failure})"), user_and_system(before, after)),
        };
        let figures = sample.figures;
        self.results.profiles.push(Profile {
            cell: cell.into(),
            subject: subject.name.clone(),
            iops: figures.iops,
            server_us: sample.server_cpu / figures.iops * 1e6,
            driver_us: figures.cpu / figures.seconds / figures.iops * 1e6,
            source,
            groups,
        });
        let driver = if subject.name == WEIR { Driver::Weir.name() } else { OWN };
        Ok(Row { subject: subject.name.clone(), driver, samples: vec![sample], extra_rounds: 0, best: true })
    }
}

fn user_and_system(before: (f64, f64), after: (f64, f64)) -> Vec<Group> {
    let (user, system) = (after.0 - before.0, after.1 - before.1);
    let all = (user + system).max(f64::MIN_POSITIVE);
    let group = |(name, seconds): (&str, f64)| Group { name: name.into(), fraction: seconds / all };
    [("the kernel", system), ("the process itself", user)].map(group).to_vec()
}
