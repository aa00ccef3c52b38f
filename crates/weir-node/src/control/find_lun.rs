//! Finds the LUN of a volume among this host's devices: by the identity of its filesystem, never by its path. A copy of the LUN that the
//! storage has made (a snapshot, a clone, a replica at another site) has the same filesystem: it is told from the LUN by the LUN's own
//! identity, where both devices have one.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use weir_cluster::records::LunRecord;
use weir_volume::lun::filesystem::open_lun;
use weir_volume::lun::identity::{are_different, block_devices, device_of, identity_of};
use weir_volume::lun::setup::several_paths;

use super::looks::{LOOKS, Looks, silence};

/// A device with the filesystem of a volume.
#[derive(Debug)]
struct Candidate {
    path: PathBuf,
    /// Of the device, if it has one.
    identity: Option<String>,
}

/// The path of a volume's LUN. `devices`: where it may be; empty: all block devices of this host. Blocks, but not on a device that does not
/// answer.
///
/// # Errors
/// In words: it is not there, only a copy of it is, or it is at more than one path; and which devices do not answer.
pub fn find(volume: &str, lun: &LunRecord, devices: &[PathBuf]) -> Result<PathBuf, String> {
    find_by(&LOOKS, volume, lun, devices)
}

fn find_by(
    looks: &'static Looks,
    volume: &str,
    lun: &LunRecord,
    devices: &[PathBuf],
) -> Result<PathBuf, String> {
    let all = if devices.is_empty() { block_devices() } else { devices.to_vec() };
    let of_lun = lun.clone();
    let looked = looks.at_all(&all, move |path| candidate(&of_lun, path));
    let found = looked.answers.into_iter().flatten().collect();
    choose(volume, lun, found, !devices.is_empty()).map_err(|why| why + &silence(&looked.silent))
}

/// The LUN among the devices with its filesystem. `is_listed`: the configuration says where it may be.
fn choose(volume: &str, lun: &LunRecord, found: Vec<Candidate>, is_listed: bool) -> Result<PathBuf, String> {
    let is_copy =
        |one: &Candidate| one.identity.as_ref().is_some_and(|own| are_different(&lun.identity, own));
    let (copies, mut own): (Vec<_>, Vec<_>) = found.into_iter().partition(is_copy);
    match own.len() {
        0 => {}
        1 => return Ok(own.remove(0).path),
        _ => {
            let paths: Vec<PathBuf> = own.into_iter().map(|one| one.path).collect();
            return Err(several_paths(&lun.identity, &paths));
        }
    }
    let nothing = if is_listed { "none of lun.devices has" } else { "no block device of this host has" };
    let nothing = format!("{nothing} LUN {} (filesystem {})", lun.identity, lun.uuid);
    Err(match copies.is_empty() {
        true => nothing,
        false => format!("{nothing}; {}", describe(volume, &copies)),
    })
}

/// What an operator does about copies where the LUN is not.
fn describe(volume: &str, copies: &[Candidate]) -> String {
    let named = |one: &Candidate| one.identity.clone().unwrap_or_default();
    let all: Vec<String> =
        copies.iter().map(|one| format!("{} ({})", one.path.display(), named(one))).collect();
    let first = copies.first().map(named).unwrap_or_default();
    // By several paths it is one LUN.
    let is_one = copies.iter().all(|one| device_of(&named(one)) == device_of(&first));
    let identity = if is_one { first.as_str() } else { "IDENTITY" };
    format!(
        "the same filesystem is on another LUN at {}: a copy is not used; if the storage has moved the volume there, `weir volume set-identity \
         {volume} {identity}`",
        all.join(", ")
    )
}

fn candidate(lun: &LunRecord, path: &Path) -> Option<Candidate> {
    // A device that does not answer is not it now, whatever this host has in its buffers of it.
    let device = open_lun(path, LunRecord::bytes(&lun.uuid)?, None, false, None).ok()?;
    let identity = identity_of(device.metadata().ok()?.rdev());
    Some(Candidate { path: path.to_path_buf(), identity })
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::time::Duration;

    use rustix::fs::Mode;
    use weir_block::Nanos;

    use super::*;

    fn lun(identity: &str) -> LunRecord {
        LunRecord {
            identity: identity.into(),
            filesystem: "xfs".into(),
            uuid: "1".repeat(32),
            mark: "2".repeat(32),
            heartbeat: 0,
            redirected: false,
        }
    }

    fn chosen(identity: &str, found: &[(&str, Option<&str>)]) -> Result<PathBuf, String> {
        let candidate = |(path, identity): &(&str, Option<&str>)| Candidate {
            path: path.into(),
            identity: identity.map(str::to_owned),
        };
        choose("v", &lun(identity), found.iter().map(candidate).collect(), false)
    }

    /// A host that does not see the LUN, and sees its copy, would have a volume of its own.
    #[test]
    fn a_copy_of_the_lun_is_not_the_lun() {
        let (lun, copy) = (("/dev/sdb", Some("naa.1")), ("/dev/sdc", Some("naa.2")));
        assert_eq!(chosen("naa.1", &[lun, copy]).unwrap(), Path::new("/dev/sdb"));
        assert_eq!(chosen("naa.2", &[lun, copy]).unwrap(), Path::new("/dev/sdc"));
        assert_eq!(chosen("mpath-3a", &[copy, ("/dev/sdd", Some("naa.a"))]).unwrap(), Path::new("/dev/sdd"));
        let said = chosen("naa.1", &[copy]).unwrap_err();
        for words in [
            "no block device of this host has LUN naa.1",
            "on another LUN at /dev/sdc (naa.2): a copy is not used",
            "`weir volume set-identity v naa.2`",
        ] {
            assert!(said.contains(words), "{said}");
        }
        let by_two_paths = chosen("naa.1", &[copy, ("/dev/dm-1", Some("mpath-32"))]).unwrap_err();
        assert!(by_two_paths.contains("/dev/sdc (naa.2), /dev/dm-1 (mpath-32): a copy"), "{by_two_paths}");
        assert!(by_two_paths.contains("`weir volume set-identity v naa.2`"), "{by_two_paths}");
        let two = chosen("naa.1", &[copy, ("/dev/sdd", Some("naa.3"))]).unwrap_err();
        assert!(two.contains("`weir volume set-identity v IDENTITY`"), "{two}");
    }

    /// A FIFO that nobody writes to is opened by nobody, as a multipath device without a path.
    #[test]
    fn a_device_that_hangs_is_named_and_not_waited_for_again() {
        static LOOKS: Looks = Looks::new(Duration::from_secs(1));
        let directory = tempfile::tempdir().unwrap();
        let (hung, other) = (directory.path().join("hung"), directory.path().join("other"));
        rustix::fs::mkfifoat(rustix::fs::CWD, &hung, Mode::RUSR | Mode::WUSR).unwrap();
        std::fs::write(&other, "no filesystem").unwrap();
        let begun = Nanos::now();
        for _ in 0..10 {
            let said = find_by(&LOOKS, "v", &lun("naa.1"), &[hung.clone(), other.clone()]).unwrap_err();
            let end = format!("; {} does not answer", hung.display());
            assert!(said.starts_with("none of lun.devices has LUN naa.1") && said.ends_with(&end), "{said}");
        }
        assert!(Nanos::now() - begun < Duration::from_secs(5));
        // Ends the thread that waits.
        drop(OpenOptions::new().write(true).open(&hung).unwrap());
    }

    /// What has no name of its own is known by its filesystem alone, as is a LUN whose record has none.
    #[test]
    fn where_nothing_tells_the_filesystem_counts() {
        for (recorded, identity) in [("naa.1", None), ("naa.1", Some("file-1-2")), ("size-9", Some("naa.1"))]
        {
            assert_eq!(chosen(recorded, &[("/dev/a", identity)]).unwrap(), Path::new("/dev/a"));
        }
        let said = chosen("naa.1", &[]).unwrap_err();
        assert!(!said.contains("copy"), "{said}");
        let two = chosen("naa.1", &[("/dev/a", None), ("/dev/b", Some("naa.1"))]).unwrap_err();
        assert!(two.contains("more than one path (/dev/a, /dev/b)"), "{two}");
    }
}
