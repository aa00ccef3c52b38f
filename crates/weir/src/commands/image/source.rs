//! An image file that is to be imported: its format and its size, found without a look by qemu-img.
//!
//! QEMU opens whatever other files an image names, and guesses the format by the first bytes, which in a raw image are the guest's: a
//! guest could name any file of the host as its backing file, and read it once its image is taken for qcow2. So the header is read here
//! first, and nothing is opened that needs another file. Whoever writes to the file may put one in afterwards: QEMU is told to open no backing
//! file in any case. (It has no such word for a file with the data.)

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use crate::cli::Format;
use crate::failure::Failure;

/// First bytes of an image that are looked at.
const HEAD: usize = 512;
const QCOW2: &[u8] = b"QFI\xfb";
/// An incompatible feature of version 3: the data is in another file.
const EXTERNAL_DATA: u64 = 1 << 2;

/// Formats by their first bytes, with their place, that are not imported.
const OTHERS: [(usize, &[u8], &str); 6] = [
    (0, b"KDMV", "VMDK"),
    (0, b"COWD", "VMDK"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"conectix", "VHD"),
    (0, b"QED\0", "QED"),
    (0x40, &[0x7f, 0x10, 0xda, 0xbe], "VDI"),
];

/// An image that can be imported.
#[derive(Debug)]
pub struct Source {
    /// Absolute: QEMU takes what is before a colon in another name for a protocol.
    pub path: PathBuf,
    pub format: Format,
    /// Bytes of the disk in it.
    pub size: u64,
}

/// The arguments that name an image to qemu-img.
#[derive(Debug)]
pub struct Image(Vec<String>);

impl Image {
    /// The raw bytes at a path or an address.
    pub fn raw(at: &str) -> Image {
        Image(vec!["-f".into(), Format::Raw.name().into(), at.into()])
    }

    /// An image in a file or on a block device. `path`: absolute.
    ///
    /// # Errors
    /// The path is not UTF-8.
    pub fn of_file(path: &Path, format: Format) -> Result<Image, Failure> {
        let shown = text(path)?;
        if format == Format::Raw {
            return Ok(Image::raw(shown));
        }
        let is_device = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
        let driver = if is_device { "host_device" } else { "file" };
        let file = serde_json::json!({ "driver": driver, "filename": shown });
        let image = serde_json::json!({ "driver": format.name(), "file": file, "backing": null });
        Ok(Image(vec![format!("json:{image}")]))
    }

    /// Arguments of qemu-img.
    pub fn arguments(&self) -> Vec<&str> {
        self.0.iter().map(String::as_str).collect()
    }
}

/// A path in an argument of another program.
///
/// # Errors
/// It is not UTF-8.
pub fn text(path: &Path) -> Result<&str, Failure> {
    path.to_str().ok_or_else(|| Failure::usage(format!("{} is not UTF-8", path.display())))
}

/// Examines an image. `wanted`: the format, if the user names it.
///
/// # Errors
/// It cannot be read, has no data, or is refused.
pub fn examine(path: &Path, wanted: Option<Format>) -> Result<Source, Failure> {
    let named = path;
    // The file itself: /dev/stdin is another one for qemu-img.
    let path = std::fs::canonicalize(path).map_err(|error| Failure::unreadable(path, &error))?;
    let read = || -> io::Result<(Vec<u8>, u64)> {
        let kind = std::fs::metadata(&path)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is neither a file nor a block device",
            ));
        }
        let mut file = File::open(&path)?;
        let length = file.seek(SeekFrom::End(0))?;
        file.rewind()?;
        let mut head = Vec::new();
        file.take(HEAD as u64).read_to_end(&mut head)?;
        Ok((head, length))
    };
    let (head, length) = read().map_err(|error| Failure::unreadable(&path, &error))?;
    let format = format_of(named, &head, wanted)?;
    let size = match format {
        Format::Raw => length,
        Format::Qcow2 => qcow2_size(&path, &head)?,
    };
    if size == 0 {
        return Err(Failure::refused(format!("{} has no data", path.display())));
    }
    Ok(Source { path, format, size })
}

fn format_of(path: &Path, head: &[u8], wanted: Option<Format>) -> Result<Format, Failure> {
    let (looks_like_qcow2, shown) = (head.starts_with(QCOW2), path.display());
    match wanted {
        Some(Format::Qcow2) if !looks_like_qcow2 => {
            return Err(Failure::refused(format!("{shown} is not qcow2: it does not begin as one does")));
        }
        Some(format) => return Ok(format),
        None => {}
    }
    let is_named_so = path.extension().is_some_and(|extension| extension == "qcow2");
    match (looks_like_qcow2, is_named_so) {
        (true, true) => return Ok(Format::Qcow2),
        (true, false) => {
            let message = format!("{shown} begins as qcow2 does, and its name does not end in .qcow2");
            return Err(Failure::refused(message).hint(
                "say what it is with --format: raw if a guest has written it, qcow2 if it is an image that you trust",
            ));
        }
        (false, true) => {
            let message = format!("{shown} is named as qcow2, and does not begin as one does");
            return Err(Failure::refused(message).hint("if it is raw, add --format raw"));
        }
        (false, false) => {}
    }
    let is_there =
        |(at, magic, _): &&(usize, &[u8], &str)| head.get(*at..).is_some_and(|rest| rest.starts_with(magic));
    if let Some((.., name)) = OTHERS.iter().find(is_there) {
        return Err(Failure::refused(format!("{shown} begins as {name} does, which is not imported")).hint(
            "`qemu-img convert -O qcow2` makes an image of it that is; if it is raw, add --format raw",
        ));
    }
    Ok(Format::Raw)
}

/// The size of the disk in a qcow2 image that needs nothing but itself (QEMU, `docs/interop/qcow2.txt`).
fn qcow2_size(path: &Path, head: &[u8]) -> Result<u64, Failure> {
    let refused =
        |what: &str, hint: &str| Err(Failure::refused(format!("{}: {what}", path.display())).hint(hint));
    let number =
        |at: usize| head.get(at..at + 8).and_then(|bytes| Some(u64::from_be_bytes(bytes.try_into().ok()?)));
    let small =
        |at: usize| head.get(at..at + 4).and_then(|bytes| Some(u32::from_be_bytes(bytes.try_into().ok()?)));
    let (Some(version), Some(backing), Some(size), Some(encryption), Some(features)) =
        (small(4), number(8), number(24), small(32), number(72))
    else {
        return refused("its header is cut off", "make the image again");
    };
    let alone = "make an image of it that needs nothing else: `qemu-img convert -O qcow2`, where you trust what it names";
    if !matches!(version, 2 | 3) {
        return refused(&format!("it is qcow version {version}, and 2 and 3 are imported"), alone);
    }
    if backing != 0 {
        return refused("it has a backing file", alone);
    }
    if version == 3 && features & EXTERNAL_DATA != 0 {
        return refused("its data is in another file", alone);
    }
    if encryption != 0 {
        return refused("it is encrypted", "decrypt it first");
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, head: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(name);
        let mut content = head.to_vec();
        content.resize(8192, 0);
        std::fs::write(&path, content).expect("a file");
        (directory, path)
    }

    fn header(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut head = vec![0; 112];
        head[..4].copy_from_slice(QCOW2);
        head[7] = 3;
        head[24..32].copy_from_slice(&(1u64 << 30).to_be_bytes());
        change(&mut head);
        head
    }

    /// A guest writes the header of a qcow2 image, with a backing file, to the first block of its raw disk.
    #[test]
    fn what_a_guest_has_written_is_not_taken_for_a_header() {
        let hostile = header(|head| head[8..16].copy_from_slice(&104u64.to_be_bytes()));
        let (_directory, path) = file("disk.img", &hostile);
        let refused = examine(&path, None).expect_err("it is ambiguous");
        assert!(
            refused.message.contains("begins as qcow2 does") && refused.hint.contains("--format"),
            "{refused:?}"
        );
        let raw = examine(&path, Some(Format::Raw)).expect("it is data");
        assert_eq!((raw.format, raw.size), (Format::Raw, 8192));
        let refused = examine(&path, Some(Format::Qcow2)).expect_err("it names a file");
        assert!(refused.message.contains("backing file"), "{refused:?}");
    }

    #[test]
    fn an_image_needs_nothing_but_itself() {
        let examined = |head: Vec<u8>| {
            let (_directory, path) = file("a.qcow2", &head);
            examine(&path, None).map(|source| source.size).map_err(|failure| failure.message)
        };
        assert_eq!(examined(header(|_| {})), Ok(1 << 30));
        for (what, head) in [
            ("backing file", header(|head| head[15] = 1)),
            ("another file", header(|head| head[79] = 4)),
            ("encrypted", header(|head| head[35] = 1)),
            ("version 1", header(|head| head[7] = 1)),
            ("no data", header(|head| head[24..32].fill(0))),
            ("named as qcow2", vec![0; 112]),
        ] {
            let message = examined(head).expect_err(what);
            assert!(message.contains(what), "{what}: {message}");
        }
    }

    #[test]
    fn other_formats_are_not_taken_for_raw() {
        let (_directory, path) = file("disk.vmdk", b"KDMV");
        assert!(examine(&path, None).expect_err("no raw image").message.contains("VMDK"));
        assert_eq!(examine(&path, Some(Format::Raw)).expect("as told").size, 8192);
        let (_directory, path) = file("disk", b"");
        assert_eq!(examine(&path, None).expect("raw").format, Format::Raw);
        assert!(examine(Path::new("/dev/null"), None).is_err());
    }
}
