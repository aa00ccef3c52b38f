//! Finds the LUN of a volume among this host's devices: by the identity of its filesystem, never by its path.

use std::fs::File;
use std::path::{Path, PathBuf};

use weir_cluster::records::LunRecord;
use weir_volume::lun::filesystem::{Content, content};
use weir_volume::lun::identity::identity_at;
use weir_volume::lun::setup::several_paths;

/// The path of a volume's LUN. `devices`: where it may be; empty: all block devices of this host. Blocks.
///
/// # Errors
/// In words: it is not there, or at more than one path.
pub fn find(lun: &LunRecord, devices: &[PathBuf]) -> Result<PathBuf, String> {
    let all = if devices.is_empty() { all() } else { devices.to_vec() };
    let mut found: Vec<PathBuf> = all.into_iter().filter(|path| is_it(lun, path)).collect();
    match (found.len(), devices.is_empty()) {
        (1, _) => Ok(found.remove(0)),
        (0, true) => {
            Err(format!("no block device of this host has LUN {} (filesystem {})", lun.identity, lun.uuid))
        }
        (0, false) => Err(format!("none of lun.devices has LUN {} (filesystem {})", lun.identity, lun.uuid)),
        _ => Err(several_paths(&lun.identity, &found)),
    }
}

/// The paths of this host to the LUN of an identity, among `devices`, or among all of its devices.
pub fn paths_of(identity: &str, devices: &[PathBuf]) -> Vec<PathBuf> {
    let all = if devices.is_empty() { all() } else { devices.to_vec() };
    all.into_iter().filter(|path| identity_at(path).as_deref() == Some(identity)).collect()
}

fn is_it(lun: &LunRecord, path: &Path) -> bool {
    // A device that does not answer is not it now.
    let Ok(device) = File::open(path) else { return false };
    match content(&device, path) {
        Ok(Content::Filesystem(found)) => LunRecord::bytes(&lun.uuid) == Some(found.uuid),
        Ok(Content::Other) | Err(_) => false,
    }
}

/// All block devices, partitions among them.
fn all() -> Vec<PathBuf> {
    let Ok(devices) = std::fs::read_dir("/sys/class/block") else { return Vec::new() };
    let mut all: Vec<PathBuf> = devices
        .flatten()
        .map(|device| Path::new("/dev").join(device.file_name().to_string_lossy().replace('!', "/")))
        .collect();
    all.sort();
    all
}
