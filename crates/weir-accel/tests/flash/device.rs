//! A flash device in memory that fails when the test says so.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use weir_accel::flash::FlashDevice;
use weir_accel::flash::device_bytes;

pub struct Memory {
    file: File,
    pub device: Arc<FlashDevice>,
}

impl Memory {
    /// A device with room for so many logs.
    pub fn new(slots: u64, log: u64) -> Memory {
        let fd = memfd_create("flash", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let size = device_bytes(slots, log);
        ftruncate(&fd, size).unwrap();
        let file = File::from(fd);
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let device = FlashDevice::open(&path, size, log, 7).unwrap();
        Memory { file, device }
    }

    /// All that is there.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.file.metadata().unwrap().len() as usize];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// From now on every write fails (EPERM): the kernel takes none for a sealed file, through whatever descriptor.
    pub fn fail_writes(&self) {
        fcntl_add_seals(&self.file, SealFlags::WRITE).unwrap();
    }
}
