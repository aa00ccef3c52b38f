//! Processes of the suite: start, CPU time, end.

use std::fs;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use weir_block::Nanos;
use weir_nbd::Uri;
use weir_nbd::client::NbdClient;

use crate::error::{Failure, Outcome};

/// Timeout of a server's start.
const PATIENCE: Duration = Duration::from_secs(20);

/// A child process. Ended when dropped.
pub struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts `command`; it inherits stderr.
    pub fn start(command: &mut Command) -> Outcome<Process> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.map_err(Failure::of(format!("cannot start {name} (`make setup` installs it)")))?;
        Ok(Process { child, name })
    }

    /// Starts `command`, which answers each line of input with a line of output. Also returns its input and output.
    pub fn start_dialogue(command: &mut Command) -> Outcome<(Process, ChildStdin, ChildStdout)> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(Failure::of(format!("cannot start {name}")))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let process = Process { child, name };
        let (input, output) = pipes.ok_or_else(|| Failure("a process without its pipes".into()))?;
        Ok((process, input, output))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the export answers.
    pub fn wait_for(&mut self, uri: &Uri) -> Outcome<()> {
        let deadline = Nanos::now() + PATIENCE;
        loop {
            match NbdClient::connect(uri) {
                Ok(client) => {
                    client.disconnect();
                    return Ok(());
                }
                Err(error) if Nanos::now() >= deadline => {
                    return Err(Failure(format!("{} does not come up: {error}", self.name)));
                }
                Err(_) => {}
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(Failure(format!("{} ended at once: {status}", self.name)));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Only fails when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// CPU seconds, user and system, that processes have used so far, all their threads together (proc(5), `stat`).
pub fn cpu_seconds(pids: &[u32]) -> Outcome<f64> {
    pids.iter().map(|pid| cpu_times(*pid).map(|(user, system)| user + system)).sum()
}

/// CPU seconds that a process has used so far, in user and in system mode, all its threads together.
pub fn cpu_times(pid: u32) -> Outcome<(f64, f64)> {
    let seconds = |ticks| ticks as f64 / rustix::param::clock_ticks_per_second() as f64;
    ticks(pid).map(|(user, system)| (seconds(user), seconds(system)))
}

fn ticks(pid: u32) -> Outcome<(u64, u64)> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).map_err(Failure::of(format!("process {pid} is gone")))?;
    parse_ticks(&text).ok_or_else(|| Failure(format!("{path} is not understood")))
}

/// Fields 14 and 15. The second field, the program's name, may itself hold blanks and brackets.
fn parse_ticks(stat: &str) -> Option<(u64, u64)> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_behind_the_name() {
        let stat = "17 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 30 12 13 14";
        assert_eq!(parse_ticks(stat), Some((30, 12)));
        assert_eq!(parse_ticks("nonsense"), None);
    }

    #[test]
    fn our_own_time_grows() {
        let pid = [std::process::id()];
        let before = cpu_seconds(&pid).unwrap();
        let end = weir_load::cpu::of_this_process() + Duration::from_millis(60);
        while weir_load::cpu::of_this_process() < end {
            std::hint::spin_loop();
        }
        assert!(cpu_seconds(&pid).unwrap() - before >= 0.03);
        assert!(cpu_seconds(&[u32::MAX]).is_err());
    }
}
