//! A history in a file, so that another process can verify the data of this one.
//!
//! `WEIRHIST`, format version, the layout and the run, then for each block two LEB128 numbers: the floor, and
//! the number of versions issued above it. A CRC-32C over everything comes last. Numbers are little endian.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::history::{History, Initial, Versions};
use super::layout::Layout;
use super::trail::Trail;
use crate::workload::Span;

const MAGIC: [u8; 8] = *b"WEIRHIST";
const FORMAT: u32 = 1;

/// The reason why a history could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The file could not be read or written.
    #[error("history file {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file belongs to another load.
    #[error("history file {}: {what}", path.display())]
    Taken {
        /// The file.
        path: PathBuf,
        /// The file's owner, and the remedy.
        what: &'static str,
    },
    /// The file is not a history that this version reads.
    #[error("history file {}: {what}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The defect.
        what: &'static str,
    },
}

impl History {
    /// Writes the history to `path`, whole or not at all (through a temporary file beside it).
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), HistoryError> {
        let failed = |source| HistoryError::Io { path: path.into(), source };
        let mut temporary = path.to_path_buf().into_os_string();
        temporary.push(".new");
        let mut file = fs::File::create(&temporary).map_err(failed)?;
        file.write_all(&self.encode()).and_then(|()| file.sync_all()).map_err(failed)?;
        fs::rename(&temporary, path).map_err(failed)
    }

    /// Reads a history that [`History::save`] wrote.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, or is something else.
    pub fn load(path: &Path) -> Result<History, HistoryError> {
        let bytes = fs::read(path).map_err(|source| HistoryError::Io { path: path.into(), source })?;
        History::decode(&bytes).map_err(|what| HistoryError::Content { path: path.into(), what })
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(FORMAT.to_le_bytes());
        out.extend(u32::from(self.initial == Initial::Unknown).to_le_bytes());
        for number in [self.run, self.layout.seed, self.layout.span.offset, self.layout.span.length] {
            out.extend(number.to_le_bytes());
        }
        out.extend((self.layout.sizes.len() as u32).to_le_bytes());
        self.layout.sizes.iter().for_each(|size| out.extend(size.to_le_bytes()));
        for versions in &self.versions {
            put_varint(&mut out, versions.floor);
            put_varint(&mut out, versions.issued - versions.floor);
        }
        out.extend(crc32c::crc32c(&out).to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Result<History, &'static str> {
        if !bytes.starts_with(&MAGIC) {
            return Err("not a history (it does not start with WEIRHIST)");
        }
        let (body, sum) = bytes.split_last_chunk::<4>().ok_or("too short")?;
        if crc32c::crc32c(body) != u32::from_le_bytes(*sum) {
            return Err("damaged or cut short (its checksum does not match)");
        }
        let mut input = Input(&body[MAGIC.len()..]);
        if input.word()? != FORMAT {
            return Err("written by a newer version of weir");
        }
        let initial = if input.word()? == 0 { Initial::Zeroes } else { Initial::Unknown };
        let [run, seed, offset, length] = [input.long()?, input.long()?, input.long()?, input.long()?];
        let sizes = (0..input.word()?).map(|_| input.word()).collect::<Result<Vec<u32>, _>>()?;
        let span = Span { offset, length };
        let layout = match sizes[..] {
            [size] => Layout::uniform(span, size),
            _ => Layout::mixed(span, &sizes, seed),
        };
        let layout = layout.map_err(|_| "describes blocks that cannot be")?;
        let versions = (0..layout.blocks()).map(|_| input.versions()).collect::<Result<Vec<_>, _>>()?;
        if !input.0.is_empty() {
            return Err("has bytes left over");
        }
        Ok(History { layout, run, initial, versions, trail: Trail::default() })
    }
}

fn put_varint(out: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or("ends too early")?;
        self.0 = rest;
        Ok(*taken)
    }

    fn word(&mut self) -> Result<u32, &'static str> {
        self.take().map(u32::from_le_bytes)
    }

    fn long(&mut self) -> Result<u64, &'static str> {
        self.take().map(u64::from_le_bytes)
    }

    fn varint(&mut self) -> Result<u32, &'static str> {
        let mut number = 0u64;
        for shift in (0..35).step_by(7) {
            let [byte] = self.take()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return u32::try_from(number).map_err(|_| "has a version number beyond 32 bits");
            }
        }
        Err("has a version number beyond 32 bits")
    }

    fn versions(&mut self) -> Result<Versions, &'static str> {
        let (floor, above) = (self.varint()?, self.varint()?);
        let issued = floor.checked_add(above).ok_or("has a version number beyond 32 bits")?;
        Ok(Versions { floor, issued })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn history(seed: u64) -> History {
        let span = Span { offset: 4096, length: 3 << 20 };
        let layout = Layout::mixed(span, &[512, 65536], seed).unwrap();
        let mut history = History::new(layout, 0x1234_5678_9abc_def0 ^ seed, Initial::Zeroes);
        let mut random = fastrand::Rng::with_seed(seed);
        for versions in &mut history.versions {
            versions.floor = random.u32(..) >> random.u32(0..32);
            versions.issued = versions.floor.saturating_add(random.u32(0..3));
        }
        history
    }

    proptest! {
        #[test]
        fn what_is_saved_is_loaded(seed: u64) {
            let history = history(seed);
            prop_assert_eq!(History::decode(&history.encode()), Ok(history));
        }

        #[test]
        fn damage_is_refused(seed in 0u64..4, at: prop::sample::Index, bit in 0u32..8, cut: prop::sample::Index) {
            let good = history(seed).encode();
            let mut damaged = good.clone();
            let index = at.index(damaged.len());
            damaged[index] ^= 1 << bit;
            prop_assert!(History::decode(&damaged).is_err());
            prop_assert!(History::decode(&good[..cut.index(good.len())]).is_err());
        }
    }

    #[test]
    fn files_and_their_errors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.history");
        let history = history(9);
        history.save(&path).unwrap();
        assert_eq!(History::load(&path).unwrap(), history);
        let missing = History::load(&directory.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("none") && missing.contains("No such file"), "{missing}");
        fs::write(&path, "text").unwrap();
        let other = History::load(&path).unwrap_err().to_string();
        assert!(other.contains("not a history"), "{other}");
    }
}
