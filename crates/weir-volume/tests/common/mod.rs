//! Helpers for tests of backings: a shard's loop around one backing, and test filesystems.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use weir_block::{
    Completion, Engine, Event, IoError, Layer, Nanos, Outcome, Payload, Reactor, ReactorConfig, Request, Tag,
};
use weir_volume::{BackingOptions, EngineChoice, FileBacking};

/// Directory for files of this test run, on the build's own filesystem.
pub fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A directory in memory.
pub fn scratch_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

pub fn reactor(engine: Engine) -> Reactor {
    Reactor::new(ReactorConfig { entries: 64, buffer_limit: 64 << 20, engine, ..ReactorConfig::default() })
        .unwrap()
}

pub fn options(engine: EngineChoice) -> BackingOptions {
    BackingOptions { engine, ..BackingOptions::default() }
}

/// A shard with one backing.
pub struct Shard {
    // Dropped first: it waits for operations in flight.
    pub reactor: Reactor,
    pub backing: FileBacking,
    pub done: Vec<Completion>,
    events: Vec<Event>,
    next_tag: u64,
}

impl Shard {
    pub fn new(mut reactor: Reactor, path: &Path, options: &BackingOptions) -> Shard {
        let backing = FileBacking::open(&mut reactor, path, options).unwrap();
        Shard::around(reactor, backing)
    }

    pub fn around(reactor: Reactor, backing: FileBacking) -> Shard {
        Shard { reactor, backing, done: Vec::new(), events: Vec::new(), next_tag: 1 << 32 }
    }

    /// One turn of the loop; blocks only while operations are in flight.
    pub fn turn(&mut self) {
        self.backing.advance(&mut self.reactor, &mut self.done);
        let deadline = if self.done.is_empty() { self.backing.deadline() } else { Nanos(0) };
        let deadline = if self.backing.in_flight() == 0 { Nanos(0) } else { deadline };
        self.reactor.wait(deadline, &mut self.events).unwrap();
        for event in self.events.drain(..) {
            self.backing.on_event(&mut self.reactor, event);
        }
    }

    /// Turns until nothing is in flight; returns the completions.
    pub fn drain(&mut self) -> Vec<Completion> {
        while self.backing.in_flight() > 0 {
            self.turn();
        }
        std::mem::take(&mut self.done)
    }

    pub fn submit(&mut self, request: Request<'_>) {
        self.backing.submit(&mut self.reactor, request);
    }

    pub fn tag(&mut self) -> Tag {
        self.next_tag += 1;
        Tag(self.next_tag)
    }

    /// Submits one request and waits for its completion; nothing else may be in flight.
    pub fn ask(&mut self, request: Request<'_>) -> Result<Outcome, IoError> {
        let (kind, (_, bytes), tag) = (request.kind(), request.range(), request.tag());
        assert!(
            self.backing.has_room(kind, bytes),
            "an idle backing has no room for {kind:?} of {bytes} bytes"
        );
        self.submit(request);
        let mut done = self.drain();
        assert_eq!(done.len(), 1, "one request, one answer");
        let completion = done.remove(0);
        assert_eq!(completion.tag, tag);
        completion.result
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
        let tag = self.tag();
        self.ask(Request::Write { tag, offset, payload: Payload::Lent(bytes), fua: false }).map(done)
    }

    pub fn read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>, IoError> {
        let tag = self.tag();
        let buffer = self.reactor.buffers().take(length).unwrap();
        self.ask(Request::Read { tag, offset, buffer }).map(|outcome| match outcome {
            Outcome::Read(buffer) => buffer.bytes().to_vec(),
            other => panic!("a read brings a buffer, not {other:?}"),
        })
    }

    pub fn flush(&mut self) -> Result<(), IoError> {
        let tag = self.tag();
        self.ask(Request::Flush { tag }).map(done)
    }
}

/// Asserts that a request succeeded without data.
pub fn done(outcome: Outcome) {
    assert!(matches!(outcome, Outcome::Done), "{outcome:?}");
}

/// A loop device over a sparse file; removed on drop.
pub struct LoopDevice {
    pub device: PathBuf,
    directory: Rc<tempfile::TempDir>,
}

impl LoopDevice {
    /// `None`, with a message in the test's output, where loop devices are not available.
    pub fn new(size: u64) -> Option<LoopDevice> {
        LoopDevice::with_sectors(size, 512)
    }

    /// With sectors of `sector` bytes.
    pub fn with_sectors(size: u64, sector: u32) -> Option<LoopDevice> {
        let directory = Rc::new(scratch());
        std::fs::File::create(directory.path().join("image")).unwrap().set_len(size).unwrap();
        LoopDevice::attach(directory, sector)
    }

    /// Another device on the same file: another node's path to it.
    pub fn second_path(&self) -> LoopDevice {
        self.path_with_sectors(512)
    }

    /// One with sectors of `sector` bytes.
    pub fn path_with_sectors(&self, sector: u32) -> LoopDevice {
        LoopDevice::attach(Rc::clone(&self.directory), sector).unwrap()
    }

    fn attach(directory: Rc<tempfile::TempDir>, sector: u32) -> Option<LoopDevice> {
        let file = directory.path().join("image");
        let mut command = Command::new("losetup");
        command.args(["--direct-io=on", "-f", "--show", "-b", &sector.to_string()]).arg(&file);
        match command.output() {
            Ok(output) if output.status.success() => {
                let device: PathBuf = String::from_utf8(output.stdout).unwrap().trim().into();
                // A test that failed may have left it read-only.
                run(Command::new("blockdev").arg("--setrw").arg(&device));
                Some(LoopDevice { device, directory })
            }
            other => {
                eprintln!("skipped: no loop device here ({other:?})");
                None
            }
        }
    }

    /// The file behind the device.
    pub fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // The kernel keeps it, and whoever gets the device next could not write to it.
        let _ = Command::new("blockdev").arg("--setrw").arg(&self.device).status();
        let _ = Command::new("losetup").arg("-d").arg(&self.device).status();
    }
}

/// A filesystem on a loop device; removed on drop.
pub struct Mount {
    pub path: PathBuf,
    _directory: tempfile::TempDir,
    device: LoopDevice,
}

impl Mount {
    /// `mkfs` as in `mkfs.ext4`. `None` where loop devices are not available.
    pub fn new(mkfs: &str, size: u64) -> Option<Mount> {
        let device = LoopDevice::new(size)?;
        let directory = scratch();
        run(Command::new(mkfs).arg("-q").arg(&device.device));
        let path = directory.path().to_path_buf();
        run(Command::new("mount").arg(&device.device).arg(&path));
        Some(Mount { path, _directory: directory, device })
    }

    pub fn device(&self) -> &Path {
        &self.device.device
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.path).status();
    }
}

pub fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
