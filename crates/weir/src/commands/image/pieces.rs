//! What `qemu-img map` says of an image, added up as it comes: an image of half a megabyte whose tables are named many times over has gigabytes
//! of it.

use std::fmt;
use std::io::{BufReader, Read};

use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};

/// Most pieces of an image: of a file of 4 TiB that was written at random.
pub(super) const MOST: u64 = 64 << 20;

/// A piece of an image.
#[derive(serde::Deserialize)]
struct Piece {
    length: u64,
    data: bool,
    zero: bool,
}

struct Sum {
    most: u64,
}

/// The bytes that are neither holes nor zeroes. Reads no further than `most` pieces.
///
/// # Errors
/// There are more, or it is no such list.
pub(super) fn data_of(list: impl Read, most: u64) -> Result<u64, serde_json::Error> {
    let mut list = serde_json::Deserializer::from_reader(BufReader::new(list));
    let sum = list.deserialize_seq(Sum { most })?;
    list.end().map(|()| sum)
}

impl<'de> Visitor<'de> for Sum {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the pieces of an image")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<u64, A::Error> {
        let (mut pieces, mut sum) = (0u64, 0u64);
        while let Some(Piece { length, data, zero }) = list.next_element()? {
            pieces += 1;
            if pieces > self.most {
                return Err(A::Error::custom(format!("the image is in more than {} pieces", self.most)));
            }
            if data && !zero {
                sum = sum.saturating_add(length);
            }
        }
        Ok(sum)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// An endless list.
    struct Endless {
        read: u64,
    }

    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let piece =
                br#"{"start": 0, "length": 1, "depth": 0, "zero": false, "data": true, "offset": 7},"#;
            let text: &[u8] = if self.read == 0 { b"[" } else { piece };
            self.read += 1;
            buffer[..text.len()].copy_from_slice(text);
            Ok(text.len())
        }
    }

    #[test]
    fn only_data_counts() {
        let list = r#"[{ "start": 0, "length": 5, "present": true, "zero": false, "data": true, "offset": 1},
            { "start": 5, "length": 70, "zero": true, "data": true},
            { "start": 75, "length": 900, "zero": true, "data": false}]
            "#;
        assert_eq!(data_of(list.as_bytes(), 3).unwrap(), 5);
        assert!(data_of(list.as_bytes(), 2).unwrap_err().to_string().contains("more than 2 pieces"));
        let cut_off = &list[..80];
        assert!(data_of(cut_off.as_bytes(), 3).is_err());
        assert!(data_of(&b"[]x"[..], 3).is_err());
    }

    /// It was taken into memory as a whole.
    #[test]
    fn what_is_beyond_the_limit_is_not_read() {
        let mut endless = Endless { read: 0 };
        let said = data_of(&mut endless, 1000).unwrap_err().to_string();
        assert!(said.contains("more than 1000 pieces"), "{said}");
        assert!(endless.read < 2000, "{}", endless.read);
    }
}
