//! A real guest: Debian's kernel in QEMU with disks over NBD, driven by scripts over its serial console.
//!
//! It shows what no client of our own can: that a stock kernel finds the disk, makes a filesystem on it, and still
//! finds its files when a node was killed under it. It is emulated, hence for correctness and not for speed.
//!
//! ```no_run
//! use std::time::Duration;
//! use weir_lab::guest::{Guest, GuestConfig, GuestImage};
//! let image = GuestImage::cached("target/guest")?;
//! let config = GuestConfig::new(image, ["nbd+unix:///web-1?socket=/run/weir/n1.nbd"]);
//! let mut guest = Guest::boot(&config)?;
//! guest.run("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt", Duration::from_secs(60))?;
//! # Ok::<(), weir_lab::guest::GuestError>(())
//! ```

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};

/// Longest script, in bytes: the capacity of the serial port before the guest reads it.
const LONGEST_SCRIPT: usize = 32 << 10;

/// The part of the console that an error quotes, in bytes.
const TAIL: usize = 4 << 10;

/// Begins the lines that the guest's first process prints for us.
const MARK: &str = "@@weir ";

/// Why a guest did not execute an order.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The kernel and the initramfs cannot be made.
    #[error("the test guest cannot be built by {}:\n{output}", .script.display())]
    Build {
        /// The script that builds it.
        script: PathBuf,
        /// The script's output.
        output: String,
    },
    /// A disk's address is not one that QEMU's NBD client is given here.
    #[error("disk {0:?} is neither nbd+unix:///DISK?socket=PATH nor nbd://HOST:PORT/DISK")]
    Uri(String),
    /// A script too long for the console.
    #[error("the script has {0} bytes; the console takes {LONGEST_SCRIPT}")]
    ScriptLength(usize),
    /// QEMU or its console cannot be reached.
    #[error("{what}: {source}")]
    System {
        /// The failed operation.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// QEMU ended: it was killed, could not open a disk, or the guest's kernel panicked.
    #[error("the guest ended; QEMU says {errors:?}, the console ends with:\n{tail}")]
    Ended {
        /// QEMU's output.
        errors: String,
        /// The console's last lines.
        tail: String,
    },
    /// No answer in time. The guest goes on.
    #[error("the guest did not answer within {patience:?}; the console ends with:\n{tail}")]
    Timeout {
        /// The time that was waited.
        patience: Duration,
        /// The console's last lines.
        tail: String,
    },
    /// The script failed.
    #[error("the script ended with code {code}:\n{output}")]
    Script {
        /// Its exit code.
        code: i32,
        /// Its output.
        output: String,
    },
}

/// A kernel and an initramfs to boot.
#[derive(Clone, Debug)]
pub struct GuestImage {
    kernel: PathBuf,
    initramfs: PathBuf,
}

impl GuestImage {
    /// The image in `directory`, made there first if it is missing or out of date (takes seconds, and fetches Debian's
    /// kernel package through `apt-get`).
    ///
    /// # Errors
    /// [`GuestError::Build`], with what is missing.
    pub fn cached(directory: impl AsRef<Path>) -> Result<GuestImage, GuestError> {
        let directory = directory.as_ref();
        run_script("guest/build", |command| command.arg(directory))?;
        Ok(GuestImage { kernel: directory.join("vmlinuz"), initramfs: directory.join("initramfs") })
    }

    /// This image with programs of this machine, each as `/weir/NAME`, and with the libraries that they need. The new initramfs is a file in
    /// `directory`.
    ///
    /// # Errors
    /// [`GuestError::Build`].
    pub fn with_programs(
        &self,
        directory: &Path,
        programs: &[(&Path, &str)],
    ) -> Result<GuestImage, GuestError> {
        let initramfs = directory.join("initramfs");
        let pairs = programs.iter().map(|(program, name)| {
            let mut pair = program.as_os_str().to_owned();
            pair.push(format!("={name}"));
            pair
        });
        run_script("guest/extend", |command| command.arg(&self.initramfs).arg(&initramfs).args(pairs))?;
        Ok(GuestImage { kernel: self.kernel.clone(), initramfs })
    }

    /// Makes `image`, a raw ext4 image of `bytes` that a guest can boot from ([`GuestConfig::from_first_disk`]), with a copy of the
    /// directory `files` in it. Of an image of [`GuestImage::cached`].
    ///
    /// # Errors
    /// [`GuestError::Build`].
    pub fn root_filesystem(&self, files: &Path, image: &Path, bytes: u64) -> Result<(), GuestError> {
        let size = format!("{}K", bytes >> 10);
        run_script("guest/root", |command| command.arg(&self.initramfs).arg(files).arg(image).arg(size))
    }
}

/// Runs a script of this crate.
fn run_script(
    name: &str,
    with_arguments: impl FnOnce(&mut Command) -> &mut Command,
) -> Result<(), GuestError> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    let mut command = Command::new(&script);
    let output = with_arguments(&mut command).stdin(Stdio::null()).output();
    let output =
        output.map_err(|error| GuestError::Build { script: script.clone(), output: error.to_string() })?;
    match output.status.success() {
        true => Ok(()),
        false => {
            Err(GuestError::Build { script, output: String::from_utf8_lossy(&output.stderr).into_owned() })
        }
    }
}

/// The configuration of a guest.
#[derive(Clone, Debug)]
pub struct GuestConfig {
    /// Kernel and initramfs.
    pub image: GuestImage,
    /// Addresses of the disks, `nbd+unix:///DISK?socket=PATH` or `nbd://HOST:PORT/DISK`; they become `/dev/vda`,
    /// `/dev/vdb`, … in this order.
    pub disks: Vec<String>,
    /// The root filesystem is on the first disk ([`GuestImage::root_filesystem`]), and not in memory.
    pub from_first_disk: bool,
    /// The guest's memory in MiB; it needs 128 at least.
    pub memory: u32,
    /// Virtual processors.
    pub processors: u32,
    /// The time that requests wait for a lost server to come back, in whole seconds (P9); zero fails them.
    pub reconnect_delay: Duration,
    /// Time limit for the guest's first answer.
    pub boot_timeout: Duration,
    /// A Unix socket for QEMU's machine protocol (QMP), made when it starts.
    pub qmp: Option<PathBuf>,
    /// Do not boot: wait for a live migration from this address, for example `unix:/tmp/migration`.
    pub incoming: Option<String>,
}

impl GuestConfig {
    /// 256 MiB, one processor, a minute for a lost server, two minutes to boot.
    pub fn new(image: GuestImage, disks: impl IntoIterator<Item = impl Into<String>>) -> GuestConfig {
        GuestConfig {
            image,
            disks: disks.into_iter().map(Into::into).collect(),
            from_first_disk: false,
            memory: 256,
            processors: 1,
            reconnect_delay: Duration::from_secs(60),
            boot_timeout: Duration::from_secs(120),
            qmp: None,
            incoming: None,
        }
    }

    fn command(&self) -> Result<Command, GuestError> {
        let mut command = Command::new("qemu-system-x86_64");
        command.args([
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
        ]);
        command.args(["-monitor", "none", "-serial", "stdio"]);
        command.args(["-m", &self.memory.to_string(), "-smp", &self.processors.to_string()]);
        command.arg("-kernel").arg(&self.image.kernel).arg("-initrd").arg(&self.image.initramfs);
        // Only what is worth a line in a test's output; a panic ends QEMU.
        let root = if self.from_first_disk { " weir.root=/dev/vda" } else { "" };
        command.args(["-append", &format!("console=ttyS0 quiet loglevel=3 panic=-1 tsc=unstable{root}")]);
        if let Some(socket) = &self.qmp {
            command.args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())]);
        }
        if let Some(address) = &self.incoming {
            command.args(["-incoming", address]);
        }
        for (number, disk) in self.disks.iter().enumerate() {
            let node = format!("disk{number}");
            let drive = json!({
                "driver": "raw",
                "node-name": node,
                "cache": { "direct": true },
                "file": nbd_client(disk, self.reconnect_delay)?,
            });
            command.args(["-blockdev", &drive.to_string()]);
            command.args(["-device", &format!("virtio-blk-pci,drive={node}")]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }
}

/// QEMU's description of its NBD client for a disk's address.
fn nbd_client(uri: &str, reconnect_delay: Duration) -> Result<Value, GuestError> {
    let wrong = || GuestError::Uri(uri.to_owned());
    let (server, export) = if let Some(rest) = uri.strip_prefix("nbd+unix:///") {
        let (export, socket) = rest.split_once("?socket=").ok_or_else(wrong)?;
        (json!({ "type": "unix", "path": socket }), export)
    } else {
        let rest = uri.strip_prefix("nbd://").ok_or_else(wrong)?;
        let (address, export) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = address.rsplit_once(':').unwrap_or((address, "10809"));
        let host = host.trim_start_matches('[').trim_end_matches(']');
        (json!({ "type": "inet", "host": host, "port": port }), export)
    };
    Ok(json!({
        "driver": "nbd",
        "server": server,
        "export": export,
        "reconnect-delay": reconnect_delay.as_secs(),
    }))
}

/// The data from a pipe so far.
#[derive(Default)]
struct Transcript {
    text: Mutex<Text>,
    grown: Condvar,
}

#[derive(Default)]
struct Text {
    bytes: Vec<u8>,
    ended: bool,
}

impl Transcript {
    /// Collects a pipe on a thread of its own until it ends.
    fn collect(mut pipe: impl Read + Send + 'static) -> (Arc<Transcript>, JoinHandle<()>) {
        let transcript = Arc::new(Transcript::default());
        let collected = Arc::clone(&transcript);
        let thread = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            loop {
                let read = pipe.read(&mut piece);
                let mut text = collected.lock();
                match read {
                    Ok(0) => text.ended = true,
                    Ok(count) => text.bytes.extend_from_slice(&piece[..count]),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => text.ended = true,
                }
                collected.grown.notify_all();
                if text.ended {
                    return;
                }
            }
        });
        (transcript, thread)
    }

    fn lock(&self) -> MutexGuard<'_, Text> {
        self.text.lock().expect("nobody panics while holding the text")
    }

    /// Waits for `end` at or after byte `from`. The text up to it, or `None` when the pipe ended or time is up.
    fn until(&self, from: usize, end: &str, patience: Duration) -> Option<String> {
        let missing = |text: &mut Text| !text.ended && text.find(from, end).is_none();
        let waited = self.grown.wait_timeout_while(self.lock(), patience, missing);
        let (text, _) = waited.expect("nobody panics while holding the text");
        let found = text.find(from, end)?;
        Some(String::from_utf8_lossy(&text.bytes[from..found]).into_owned())
    }

    /// Waits until the pipe has ended, but not longer than `patience`.
    fn await_end(&self, patience: Duration) {
        let waited = self.grown.wait_timeout_while(self.lock(), patience, |text| !text.ended);
        drop(waited.expect("nobody panics while holding the text"));
    }

    fn tail(&self) -> String {
        let text = self.lock();
        let start = text.bytes.len().saturating_sub(TAIL);
        String::from_utf8_lossy(&text.bytes[start..]).into_owned()
    }
}

impl Text {
    fn find(&self, from: usize, what: &str) -> Option<usize> {
        let rest = self.bytes.get(from..)?;
        rest.windows(what.len()).position(|window| window == what.as_bytes()).map(|at| from + at)
    }
}

/// A guest that runs. Dropping it kills it.
pub struct Guest {
    qemu: Child,
    console: Arc<Transcript>,
    errors: Arc<Transcript>,
    collectors: Vec<JoinHandle<()>>,
    /// The offset on the console where the next script's output begins.
    position: usize,
    scripts: u32,
}

impl Guest {
    /// Starts QEMU and waits until the guest takes scripts; does not wait for a guest that is to come by migration.
    ///
    /// # Errors
    /// [`GuestError::Uri`]; [`GuestError::System`] when QEMU cannot be started; [`GuestError::Ended`] when it gives up (a
    /// disk that nobody serves); [`GuestError::Timeout`].
    pub fn boot(config: &GuestConfig) -> Result<Guest, GuestError> {
        let started = config.command()?.spawn();
        let mut qemu =
            started.map_err(|source| GuestError::System { what: "starting qemu-system-x86_64", source })?;
        let output = qemu.stdout.take().expect("asked for a pipe");
        let (console, console_collector) = Transcript::collect(output);
        let (errors, errors_collector) = Transcript::collect(qemu.stderr.take().expect("asked for a pipe"));
        let collectors = vec![console_collector, errors_collector];
        let mut guest = Guest { qemu, console, errors, collectors, position: 0, scripts: 0 };
        if config.incoming.is_none() {
            guest.answer("ready", config.boot_timeout)?;
        }
        Ok(guest)
    }

    /// Runs a shell script in the guest and returns its output. One script at a time: after a [`GuestError::Timeout`] the
    /// guest still works on the old one, and this waits for its answer first.
    ///
    /// # Errors
    /// [`GuestError::Script`] when it ends with another code than 0; [`GuestError::Timeout`]; [`GuestError::Ended`].
    pub fn run(&mut self, script: &str, patience: Duration) -> Result<String, GuestError> {
        if script.len() > LONGEST_SCRIPT {
            return Err(GuestError::ScriptLength(script.len()));
        }
        self.scripts += 1;
        let id = self.scripts;
        let lines = script.lines().count();
        let mut message = format!("run {id} {lines}\n");
        for line in script.lines() {
            message.push_str(line);
            message.push('\n');
        }
        // Gone once the guest was killed.
        let Some(input) = self.qemu.stdin.as_mut() else { return Err(self.ended()) };
        if let Err(source) = input.write_all(message.as_bytes()).and_then(|()| input.flush()) {
            return Err(match source.kind() {
                io::ErrorKind::BrokenPipe => self.ended(),
                _ => GuestError::System { what: "sending a script to the guest", source },
            });
        }
        let (output, code) = self.answer(&id.to_string(), patience)?;
        if code == 0 { Ok(output) } else { Err(GuestError::Script { code, output }) }
    }

    /// Waits for the mark that ends script `id`. Returns the output before it, and the code behind it.
    fn answer(&mut self, id: &str, patience: Duration) -> Result<(String, i32), GuestError> {
        let mark = format!("{MARK}{id} ");
        let Some(output) = self.console.until(self.position, &mark, patience) else {
            return Err(if self.console.lock().ended { self.ended() } else { self.timeout(patience) });
        };
        let after =
            self.console.lock().find(self.position, &mark).map_or(self.position, |at| at + mark.len());
        let Some(code) = self.console.until(after, "\n", patience) else {
            return Err(self.ended());
        };
        self.position = after + code.len() + 1;
        // The guest starts a fresh line before its mark.
        let output = output.strip_suffix('\n').unwrap_or(&output).to_owned();
        Ok((output, code.trim().parse().unwrap_or(-1)))
    }

    fn timeout(&self, patience: Duration) -> GuestError {
        GuestError::Timeout { patience, tail: self.console.tail() }
    }

    fn ended(&self) -> GuestError {
        // QEMU's last words may come a little after the console's end.
        self.errors.await_end(Duration::from_secs(5));
        GuestError::Ended { errors: self.errors.tail(), tail: self.console.tail() }
    }

    /// QEMU's process id, to stop and continue it, or to watch it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.qemu.id()
    }

    /// Everything that the console has shown.
    #[must_use]
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&self.console.lock().bytes).into_owned()
    }

    /// Pulls the guest's plug, as when its host dies, and waits until it is gone.
    pub fn kill(&mut self) {
        // Fails only when it has ended already.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        for collector in self.collectors.drain(..) {
            let _ = collector.join();
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_disks() {
        let delay = Duration::from_secs(7);
        let unix = nbd_client("nbd+unix:///web-1?socket=/run/a,b.sock", delay).unwrap();
        assert_eq!(unix["server"], json!({ "type": "unix", "path": "/run/a,b.sock" }));
        assert_eq!((unix["export"].as_str(), unix["reconnect-delay"].as_u64()), (Some("web-1"), Some(7)));
        let tcp = nbd_client("nbd://[::1]:10810/db", delay).unwrap();
        assert_eq!(tcp["server"], json!({ "type": "inet", "host": "::1", "port": "10810" }));
        assert_eq!(tcp["export"], "db");
        assert_eq!(nbd_client("nbd://host", delay).unwrap()["server"]["port"], "10809");
        assert!(matches!(nbd_client("nbd+unix:///d", delay), Err(GuestError::Uri(_))));
        assert!(matches!(nbd_client("/dev/sda", delay), Err(GuestError::Uri(_))));
    }
}
