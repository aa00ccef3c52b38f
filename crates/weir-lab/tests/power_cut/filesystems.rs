//! ext4 and XFS on a Weir disk through power cuts.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use weir_cluster::records::Medium;

use crate::common::{DISK, alone, seed};
use crate::guest::Plugged;
use crate::mounted::{Kind, Mounted};
use crate::site::{Plan, Site};
use crate::{cuts, happens, survivors};

/// The files that a guest has saved: fsync was answered for each, and for the directory.
#[derive(Debug, Default)]
struct Saved {
    files: u32,
}

impl Saved {
    /// The content of a file: its number again and again, in a length of its own.
    fn content(number: u32) -> Vec<u8> {
        number.to_le_bytes().repeat(500 + number as usize % 7000)
    }

    /// Saves files, in between with others that are never synced and that come and go, until there is no power.
    fn save(&mut self, directory: &Path) -> io::Error {
        loop {
            if let Err(error) = self.save_one(directory) {
                return error;
            }
            self.files += 1;
        }
    }

    fn save_one(&self, directory: &Path) -> io::Result<()> {
        let loose = directory.join(format!("loose{}", self.files % 50));
        fs::write(&loose, vec![7; 50_000])?;
        if self.files.is_multiple_of(3) {
            fs::remove_file(&loose)?;
        }
        let mut file = File::create(directory.join(format!("saved{}", self.files)))?;
        file.write_all(&Saved::content(self.files))?;
        file.sync_all()?;
        File::open(directory)?.sync_all()
    }

    /// All are there and whole.
    fn check(&self, directory: &Path) {
        for number in 0..self.files {
            let data = fs::read(directory.join(format!("saved{number}")))
                .unwrap_or_else(|error| panic!("file {number} of {}: {error}", self.files));
            assert!(data == Saved::content(number), "file {number} of {} is not what was saved", self.files);
        }
    }
}

/// Cuts, each in the middle of a guest's work: the filesystem comes back, nothing that was fsynced is lost, and the check
/// finds nothing.
fn survives(kind: Kind, plan: &Plan) {
    let _turn = alone();
    let seed = seed();
    let mut random = Rng::with_seed(seed);
    let mut site = Site::up(plan);
    let places = tempfile::tempdir().unwrap();
    let (at, plug) = (places.path().join("mount"), places.path().join("plug"));
    let (_, uri) = site.wait_served();
    let mut disk = Plugged::plug(&uri, &plug);
    kind.make(disk.path());
    let mut saved = Saved::default();
    for cut in 1..=cuts() {
        let mounted = Mounted::mount(kind, disk.path(), &at);
        let survivors = survivors(&mut random);
        let before = Duration::from_millis(random.u64(300..1200));
        let already = saved.files;
        let gave_up = thread::scope(|scope| {
            let saving = scope.spawn(|| saved.save(&at));
            // A file that has been begun shows that the one before it was saved.
            happens(|| saving.is_finished() || at.join(format!("saved{}", already + 1)).exists());
            thread::sleep(before);
            // Judged after the cut: the scope ends when the guest does, and it ends with its disk.
            let gave_up = saving.is_finished();
            site.power_cut(|| disk.cut());
            gave_up
        });
        assert!(!gave_up, "the guest had no files any more{}", site.bench.logs());
        disk.power_off(mounted);
        let nodes = site.shuffled(&mut random);
        site.power_on(survivors, &nodes);
        let (_, uri) = site.wait_served();
        disk = Plugged::plug(&uri, &plug);
        disk.replay_and_check(kind, &at);
        let mounted = Mounted::mount(kind, disk.path(), &at);
        saved.check(&at);
        mounted.unmount();
        eprintln!(
            "{kind:?} on {}, cut {cut}, {survivors:?}: {} files saved, all there",
            plan.policy, saved.files
        );
        assert!(saved.files > already, "seed {seed}: the guest saved nothing");
    }
    let meters = site.bench.lab.client(&site.bench.owner()).unwrap().meters(DISK).unwrap();
    let flushes = meters[0].kinds.iter().find(|kind| format!("{:?}", kind.kind) == "Flush");
    assert!(flushes.is_some_and(|kind| kind.completions > 0), "no FLUSH has reached Weir: {meters:?}");
}

fn plan(size: u64) -> Plan {
    Plan { nodes: 3, policy: "write-back+1", medium: Medium::Flash, size }
}

#[test]
fn ext4_on_flash() {
    survives(Kind::Ext4, &plan(128 << 20));
}

#[test]
fn xfs_on_flash() {
    survives(Kind::Xfs, &plan(320 << 20));
}
