//! The processes of this node before this one, since its host started: their requests may still be on their way to the storage, which the
//! kernel shows by their marks ([`Mark`]).
//!
//! The state directory has their names. The registry does not know them all: an etcd does not see the end of a process, and a note of one
//! is removed as soon as no disk needs it.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use weir_cluster::machine::Machine;
use weir_cluster::records::NodeRef;
use weir_volume::Mark;

/// The file in the state directory: a line for the running kernel and its device nodes, and then a line for each process, the oldest first.
const FILE: &str = "processes";

/// Processes that are kept, so that a node that is started again and again does not fill its disk (P10). Of that many processes, the kernel
/// has long ended the requests of the first one.
const MOST: usize = 4096;

/// Why they are not known.
#[derive(Debug, thiserror::Error)]
#[error("state_dir: {action} {path}: {source}", path = path.display())]
pub struct FormerProcessesError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Enters this process, durably, before it does any I/O for a disk. Returns the marks of those before it. `directory` is locked
/// ([`crate::state_lock`]), so that they have ended.
///
/// # Errors
/// The file cannot be read or written: a later process would not know of this one.
pub fn enter(directory: &Path, me: &NodeRef) -> Result<Vec<Mark>, FormerProcessesError> {
    // After a reboot nothing is under way, and marks at other device nodes are not seen.
    let machine = Machine::here().map_or_else(String::new, |here| format!("{} {}", here.boot, here.devices));
    enter_on(&machine, directory, &me.to_string())
}

fn enter_on(machine: &str, directory: &Path, me: &str) -> Result<Vec<Mark>, FormerProcessesError> {
    let path = directory.join(FILE);
    let failed = |action| {
        let path = path.clone();
        move |source| FormerProcessesError { action, path, source }
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(failed("reading")(error)),
    };
    let mut lines = text.lines();
    let is_here = lines.next() == Some(machine);
    let former: Vec<&str> = lines.filter(|line| is_here && !line.is_empty() && *line != me).collect();
    let former = &former[former.len().saturating_sub(MOST)..];
    let mut new = format!("{machine}\n");
    former.iter().chain([&me]).for_each(|name| new += &format!("{name}\n"));
    replace(directory, &path, &new).map_err(failed("writing"))?;
    Ok(former.iter().map(|name| Mark::of(name)).collect())
}

/// A crash leaves the file as it was before or after.
fn replace(directory: &Path, path: &Path, text: &str) -> io::Result<()> {
    let making = path.with_extension("new");
    let mut file = File::create(&making)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&making, path)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(names: &[&str]) -> Vec<Mark> {
        names.iter().map(|name| Mark::of(name)).collect()
    }

    #[test]
    fn each_process_knows_all_before_it_on_the_same_kernel() {
        let directory = tempfile::tempdir().unwrap();
        let enter = |machine: &str, me: &str| enter_on(machine, directory.path(), me).unwrap();
        assert_eq!(enter("boot-1 5", "a#1"), []);
        assert_eq!(enter("boot-1 5", "a#2"), marks(&["a#1"]));
        assert_eq!(enter("boot-1 5", "a#2"), marks(&["a#1"]), "not itself");
        // An operator has given the node another name.
        assert_eq!(enter("boot-1 5", "b#3"), marks(&["a#1", "a#2"]));
        assert_eq!(enter("boot-2 5", "b#4"), [], "nothing is under way after a reboot");
        assert_eq!(enter("boot-2 5", "b#5"), marks(&["b#4"]));
        assert_eq!(enter("boot-2 6", "b#6"), []);
        for number in 0..MOST + 5 {
            enter("boot-2 6", &format!("c#{number}"));
        }
        let known = enter("boot-2 6", "d#1");
        assert_eq!((known.len(), known[MOST - 1]), (MOST, Mark::of(&format!("c#{}", MOST + 4))));
    }

    #[test]
    fn a_file_that_cannot_be_read_or_written_is_named() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(FILE), [0xff, 0xfe]).unwrap();
        let error = enter_on("boot-1 5", directory.path(), "a#1").unwrap_err().to_string();
        assert!(error.starts_with("state_dir: reading ") && error.contains("/processes: "), "{error}");
        let absent = directory.path().join("none");
        let error = enter_on("boot-1 5", &absent, "a#1").unwrap_err().to_string();
        assert!(error.starts_with("state_dir: writing "), "{error}");
    }
}
