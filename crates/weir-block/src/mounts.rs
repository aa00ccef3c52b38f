//! The kernel's list of mounts (`proc_pid_mountinfo(5)`).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Its device: `MAJOR:MINOR`.
    pub device: Vec<u8>,
    /// Its directory or file.
    pub point: PathBuf,
    /// The kind of filesystem.
    pub kind: Vec<u8>,
}

/// The mounts of a list, as in `/proc/self/mountinfo`, in its order. Lines that are none are left out.
pub fn mounts(list: &[u8]) -> impl Iterator<Item = Mount> + '_ {
    list.split(|&byte| byte == b'\n').filter_map(|line| {
        let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
        let separator = fields.iter().position(|field| *field == b"-")?;
        Some(Mount {
            device: fields.get(2)?.to_vec(),
            point: PathBuf::from(OsString::from_vec(unescape(fields.get(4)?))),
            kind: fields.get(separator + 1)?.to_vec(),
        })
    })
}

/// Space, tab, newline and backslash are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, behind)) = rest.split_first() {
        let code = behind.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let code = code.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code.filter(|_| byte == b'\\') {
            Some(code) => {
                plain.push(code);
                rest = &behind[3..];
            }
            None => {
                plain.push(byte);
                rest = behind;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_octal_digits_behind_a_backslash_are_an_escape() {
        assert_eq!(unescape(b"a\\9b\\"), b"a\\9b\\");
        assert_eq!(unescape(b"my\\040disks\\134"), b"my disks\\");
    }
}
