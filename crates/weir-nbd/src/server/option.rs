//! Parsers of option bodies ("Option types"). No length in them is trusted.

use crate::protocol::LONGEST_STRING;

/// The reason why the server refuses an option's body; sent to the client.
pub(super) type Malformed = &'static str;

/// Body of `INFO` and `GO`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InfoQuery<'a> {
    pub name: &'a str,
    /// Big-endian pairs of bytes.
    wanted: &'a [[u8; 2]],
}

impl InfoQuery<'_> {
    pub fn wants(&self, kind: u16) -> bool {
        self.wanted.contains(&kind.to_be_bytes())
    }
}

/// Body of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ContextQuery<'a> {
    pub name: &'a str,
    /// Number of queries.
    pub count: u32,
    queries: &'a [u8],
}

impl<'a> ContextQuery<'a> {
    /// Each query. `parse_contexts` has validated them, so none is truncated.
    pub fn queries(&self) -> impl Iterator<Item = &'a [u8]> {
        let mut rest = self.queries;
        std::iter::from_fn(move || take_counted(&mut rest))
    }
}

pub(super) fn parse_info(mut body: &[u8]) -> Result<InfoQuery<'_>, Malformed> {
    let name = take_name(&mut body)?;
    let (count, list) = body.split_first_chunk().ok_or("the number of information requests is missing")?;
    let (wanted, rest) = list.as_chunks();
    if !rest.is_empty() || wanted.len() != usize::from(u16::from_be_bytes(*count)) {
        return Err("the list of information requests is not as long as it says");
    }
    Ok(InfoQuery { name, wanted })
}

pub(super) fn parse_contexts(mut body: &[u8]) -> Result<ContextQuery<'_>, Malformed> {
    let name = take_name(&mut body)?;
    let (count, queries) = body.split_first_chunk().ok_or("the number of queries is missing")?;
    let count = u32::from_be_bytes(*count);
    let mut rest = queries;
    for _ in 0..count {
        take_counted(&mut rest).ok_or("a query is longer than the option")?;
    }
    if !rest.is_empty() {
        return Err("bytes follow the last query");
    }
    Ok(ContextQuery { name, count, queries })
}

/// A string that conforms to the document: UTF-8 without NUL, at most 4096 bytes.
pub(super) fn parse_name(bytes: &[u8]) -> Result<&str, Malformed> {
    if bytes.len() > LONGEST_STRING {
        return Err("an export's name has at most 4096 bytes");
    }
    let name = std::str::from_utf8(bytes).map_err(|_| "the export's name is not UTF-8")?;
    if name.contains('\0') { Err("the export's name contains a NUL byte") } else { Ok(name) }
}

fn take_name<'a>(body: &mut &'a [u8]) -> Result<&'a str, Malformed> {
    parse_name(take_counted(body).ok_or("the export's name is longer than the option")?)
}

/// A 32-bit length and as many bytes; `None` when they are incomplete.
fn take_counted<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, rest) = bytes.split_first_chunk()?;
    let (taken, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
    *bytes = rest;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_info_query_is_read_exactly() {
        let body = [0, 0, 0, 2, b'v', b'm', 0, 2, 0, 3, 0, 1];
        let query = parse_info(&body).unwrap();
        assert_eq!(query.name, "vm");
        assert!(query.wants(3) && query.wants(1) && !query.wants(2));
        for cut in 0..body.len() {
            assert!(parse_info(&body[..cut]).is_err(), "cut at {cut}");
        }
        assert!(parse_info(&[&body[..], &[0]].concat()).is_err());
    }

    #[test]
    fn a_context_query_is_read_exactly() {
        let body = [0, 0, 0, 1, b'd', 0, 0, 0, 2, 0, 0, 0, 1, b'a', 0, 0, 0, 0];
        let query = parse_contexts(&body).unwrap();
        assert_eq!((query.name, query.count), ("d", 2));
        assert_eq!(query.queries().collect::<Vec<_>>(), [&b"a"[..], b""]);
        for cut in 0..body.len() {
            assert!(parse_contexts(&body[..cut]).is_err(), "cut at {cut}");
        }
        assert!(parse_contexts(&[&body[..], &[0]].concat()).is_err());
    }

    #[test]
    fn names_are_checked() {
        assert_eq!(parse_name("größe".as_bytes()), Ok("größe"));
        assert!(parse_name(&[0xff]).is_err());
        assert!(parse_name(b"a\0b").is_err());
        assert!(parse_name(&[b'x'; 4096]).is_ok());
        assert!(parse_name(&[b'x'; 4097]).is_err());
    }
}
