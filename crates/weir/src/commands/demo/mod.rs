//! `weir demo`: three nodes on this machine, a real filesystem and a verifying load on write-back disks, their owner killed
//! in the middle; then everything is checked, and every layer measured. About three minutes.

mod filesystem;
mod load;
mod steps;

use std::path::{Path, PathBuf};

use weir_block::Nanos;
use weir_block::size::Size;
use weir_lab::{Lab, LabConfig};
use weir_node::api::{CreateDisk, CreateVolume, DiskView, Export, Medium};

use super::diagnose::{Settings, diagnose};
use crate::cli::DemoArgs;
use crate::failure::Failure;
use crate::output::{say, to_stderr};
use filesystem::Image;
use load::{Load, Verdict};
use steps::{Steps, until};

/// The disk with the filesystem.
const FILES: &str = "files";
/// The disk under the verifying load; measured afterwards.
const LOAD: &str = "load";
/// The node that is killed.
const OWNER: &str = "n1";

/// Executes the demonstration. Any deviation is a failure.
pub fn run(arguments: &DemoArgs) -> Result<(), Failure> {
    let dir = directory(arguments)?;
    end_lab_on_interrupt(&dir)?;
    let mut steps = Steps::new();
    let mut lab = steps.run("three nodes on 127.0.0.1, .2 and .3", || lab_up(&dir))?;
    let image = steps.run("an ext4 filesystem of this machine's own files", || Image::make(&dir))?;
    steps.note(&image.describe());
    steps.run("a volume, and two write-back+1 disks owned by n1", || disks_up(&lab, &dir))?;

    let load = Load::start(&lab, arguments.load.0)?;
    steps.run("the filesystem copied in through NBD, under a verifying load", || {
        image.copy_in(&uri(&lab, FILES)?)
    })?;
    let dirty = dirty(&lab)?;
    steps.note(&format!("acknowledged and not yet in the storage: {}", weir_node::units::about(dirty)));
    let killed = Nanos::now();
    steps.run("SIGKILL to n1, owner of both disks", || Ok(lab.kill(OWNER)?))?;
    let waited = steps.run("another node takes over, from its replica", || load.answered_again(killed))?;
    steps.note(&format!("{}; the load waited {:.2} s", taken_over(&lab)?, waited.as_secs_f64()));
    let load = steps.run("the load goes on there", || load.finish())?;
    let verdict =
        steps.run("every block read and held against every acknowledged write", || Verdict::of(load))?;
    steps.note(&verdict.describe());
    steps.run("the filesystem read back through NBD, e2fsck -fn", || image.read_back(&uri(&lab, FILES)?))?;
    let files = steps.run("every file compared with its original", || image.compare())?;
    steps.note(&format!("{files} files, links and directories are the same"));
    image.remove();

    steps.say("each layer of the disk measured under the same load");
    let client = lab.client(&owner(&lab, LOAD)?)?;
    // Short runs: enough to show the report. The verdict names their limits.
    let settings = Settings {
        destroy: true,
        cells: weir_diagnose::Tier::Quick.cells(),
        repeats: weir_diagnose::verdict::FEWEST_REPEATS,
        more: Some(0),
        follow_ups: false,
        without: Vec::new(),
        runtime: arguments.runtime.0,
        budget: None,
        seed: Some(1),
        resume: false,
        report: dir.join("report.html"),
        policies: None,
        replicas: Vec::new(),
        trace: None,
        thresholds: Vec::new(),
    };
    let outcome = diagnose(&client, LOAD, &settings)?;
    say(&format!("\n{}", weir_diagnose::table::render(&outcome.diagnosis, &outcome.findings)))?;
    steps.run("the lab ends, everything destaged", || Ok(lab.down()?))?;
    say(&format!(
        "\nacknowledged {} lost {}\nreport: {}\n",
        verdict.acknowledged(),
        verdict.lost(),
        outcome.report.display()
    ))?;
    verdict.into_result()
}

fn directory(arguments: &DemoArgs) -> Result<PathBuf, Failure> {
    let dir = match &arguments.dir {
        Some(dir) => std::path::absolute(dir)?,
        None => std::env::temp_dir().join(format!("weir-demo-{}", std::process::id())),
    };
    std::fs::create_dir_all(&dir)
        .map_err(|error| Failure::failed(format!("creating {}: {error}", dir.display())))?;
    Ok(dir)
}

/// Ctrl-C must not leave nodes running: they are in process groups of their own.
fn end_lab_on_interrupt(dir: &Path) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let lab = lab_dir(dir);
    std::thread::spawn(move || {
        if runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
            if let Err(error) = Lab::open(&lab).and_then(Lab::down) {
                to_stderr(&format!("weir: {error}"));
            }
            std::process::exit(130);
        }
    });
    Ok(())
}

fn lab_dir(dir: &Path) -> PathBuf {
    dir.join("lab")
}

fn lab_up(dir: &Path) -> Result<Lab, Failure> {
    Ok(Lab::up(&LabConfig::new(lab_dir(dir), std::env::current_exe()?))?)
}

fn disks_up(lab: &Lab, dir: &Path) -> Result<(), Failure> {
    let path = dir.join("pool");
    std::fs::create_dir_all(&path)?;
    let client = lab.client(OWNER)?;
    client.create_volume(&CreateVolume::dir("pool", path))?;
    for (name, size) in [(FILES, Size(1 << 30)), (LOAD, Size(load::SIZE))] {
        client.create_disk(&CreateDisk {
            name: name.to_owned(),
            volume: "pool".to_owned(),
            size: size.0,
            logical_block: 512,
            policy: "write-back+1".to_owned(),
            medium: Medium::Ram,
            limit: None,
        })?;
        client.export(name, &Export::default())?;
    }
    for name in [FILES, LOAD] {
        until(|| Ok(client.disk(name)?), |disk| disk.effective == disk.requested)?;
    }
    Ok(())
}

/// The owner's view of the disk; `None` while it has no live owner.
fn seen_by_owner(lab: &Lab, disk: &str) -> Result<Option<DiskView>, Failure> {
    for report in lab.nodes() {
        if report.process_state() == weir_lab::process::ProcessState::Running {
            let view = report.client().disk(disk)?;
            if view.detail.is_some() {
                return Ok(Some(view));
            }
        }
    }
    Ok(None)
}

fn owned(lab: &Lab, disk: &str) -> Result<DiskView, Failure> {
    let view = until(|| seen_by_owner(lab, disk), Option::is_some)?;
    view.ok_or_else(|| Failure::failed(format!("no node owns disk {disk}")))
}

fn owner(lab: &Lab, disk: &str) -> Result<String, Failure> {
    Ok(owned(lab, disk)?.owner.unwrap_or_default())
}

fn uri(lab: &Lab, disk: &str) -> Result<String, Failure> {
    let uris = owned(lab, disk)?.uris;
    uris.into_iter().next().ok_or_else(|| Failure::failed(format!("disk {disk} is not exported")))
}

fn dirty(lab: &Lab) -> Result<u64, Failure> {
    let dirty = |disk| Ok::<_, Failure>(owned(lab, disk)?.detail.map_or(0, |detail| detail.dirty_bytes));
    Ok(dirty(FILES)? + dirty(LOAD)?)
}

fn taken_over(lab: &Lab) -> Result<String, Failure> {
    let mut takers = Vec::new();
    for disk in [FILES, LOAD] {
        let view = owned(lab, disk)?;
        takers.push(format!("{disk} on {} in epoch {}", view.owner.unwrap_or_default(), view.epoch));
    }
    Ok(takers.join(", "))
}
