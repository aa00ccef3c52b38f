//! The structures and numbers of the kernel's FUSE protocol that a single file needs (`linux/fuse.h`, version 7).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The major version that the kernel and this file speak.
pub const MAJOR: u32 = 7;

/// The newest minor version whose structures are here. The kernel uses the older one of its own and this.
pub const MINOR: u32 = 41;

/// The oldest one that has `FUSE_INIT_EXT`, `FUSE_MAX_PAGES` and `FUSE_LSEEK` (Linux 5.17).
pub const OLDEST_MINOR: u32 = 36;

/// Most bytes of one read or write.
pub const LARGEST: u32 = 1 << 20;

/// Bytes of the longest request: a write.
pub const LONGEST_REQUEST: usize = LARGEST as usize + 4096;

/// The kinds of request.
pub mod opcode {
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const LSEEK: u32 = 46;
}

/// Capabilities, as agreed on in `INIT`. Those of the second word are shifted down by 32.
pub mod capability {
    pub const ASYNC_READ: u32 = 1 << 0;
    pub const BIG_WRITES: u32 = 1 << 5;
    /// Asynchronous direct I/O stays asynchronous: without it one request is under way at a time.
    pub const ASYNC_DIO: u32 = 1 << 15;
    pub const MAX_PAGES: u32 = 1 << 22;
    pub const INIT_EXT: u32 = 1 << 30;
    /// The server can have the kernel send all unanswered requests again (Linux 6.9).
    pub const HAS_RESEND_2: u32 = 1 << 7;
}

/// How an opened file is used.
pub mod open_flag {
    /// Not through the page cache.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// Writes of several threads are under way at once (Linux 6.2; ignored before).
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Asks for an end of a request, whose sender has a signal.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InterruptIn {
    pub unique: u64,
}

/// `FATTR_SIZE`: the size is to be set.
pub const SETATTR_SIZE: u32 = 1 << 3;

/// `FATTR_MODE`, `FATTR_UID` and `FATTR_GID`: who may use the file.
pub const SETATTR_ACCESS: u32 = 1 << 0 | 1 << 1 | 1 << 2;

/// The notice by which the kernel sends all unanswered requests again.
pub const NOTIFY_RESEND: i32 = 7;

/// Before each request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InHeader {
    pub length: u32,
    pub opcode: u32,
    pub unique: u64,
    pub node: u64,
    pub uid: u32,
    pub gid: u32,
    pub pid: u32,
    pub extensions: u16,
    pub padding: u16,
}

/// Before each answer. The error is negative.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct OutHeader {
    pub length: u32,
    pub error: i32,
    pub unique: u64,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InitIn {
    pub major: u32,
    pub minor: u32,
    pub max_readahead: u32,
    pub flags: u32,
    pub flags2: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InitOut {
    pub major: u32,
    pub minor: u32,
    pub max_readahead: u32,
    pub flags: u32,
    pub max_background: u16,
    pub congestion_threshold: u16,
    pub max_write: u32,
    pub time_granularity: u32,
    pub max_pages: u16,
    pub map_alignment: u16,
    pub flags2: u32,
    pub max_stack_depth: u32,
    pub request_timeout: u16,
    pub unused: [u16; 11],
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Attributes {
    pub inode: u64,
    pub size: u64,
    pub blocks: u64,
    pub accessed: u64,
    pub modified: u64,
    pub changed: u64,
    pub accessed_ns: u32,
    pub modified_ns: u32,
    pub changed_ns: u32,
    pub mode: u32,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    pub device: u32,
    pub block_size: u32,
    pub flags: u32,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AttributesOut {
    pub valid: u64,
    pub valid_ns: u32,
    pub padding: u32,
    pub attributes: Attributes,
}

/// The beginning of it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SetattrIn {
    pub valid: u32,
    pub padding: u32,
    pub handle: u64,
    pub size: u64,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct OpenIn {
    /// As given to `open(2)`.
    pub flags: u32,
    pub open_flags: u32,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct OpenOut {
    pub handle: u64,
    pub flags: u32,
    pub backing: i32,
}

/// Of a read and of a write, whose bytes follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TransferIn {
    pub handle: u64,
    pub offset: u64,
    pub size: u32,
    pub transfer_flags: u32,
    pub lock_owner: u64,
    /// As given to `open(2)`.
    pub flags: u32,
    pub padding: u32,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WriteOut {
    pub size: u32,
    pub padding: u32,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct FallocateIn {
    pub handle: u64,
    pub offset: u64,
    pub length: u64,
    pub mode: u32,
    pub padding: u32,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LseekIn {
    pub handle: u64,
    pub offset: u64,
    pub whence: u32,
    pub padding: u32,
}

#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct StatfsOut {
    pub blocks: u64,
    pub free: u64,
    pub available: u64,
    pub files: u64,
    pub free_files: u64,
    pub block_size: u32,
    pub name_length: u32,
    pub fragment_size: u32,
    pub padding: u32,
    pub spare: [u32; 6],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_kernels_header() {
        let sizes = [
            (size_of::<InHeader>(), 40),
            (size_of::<OutHeader>(), 16),
            (size_of::<InitOut>(), 64),
            (size_of::<Attributes>(), 88),
            (size_of::<AttributesOut>(), 104),
            (size_of::<OpenIn>(), 8),
            (size_of::<OpenOut>(), 16),
            (size_of::<TransferIn>(), 40),
            (size_of::<WriteOut>(), 8),
            (size_of::<FallocateIn>(), 32),
            (size_of::<LseekIn>(), 24),
            (size_of::<StatfsOut>(), 80),
        ];
        for (size, expected) in sizes {
            assert_eq!(size, expected);
        }
    }
}
