//! The output of `blkparse` (blkparse(1), "OUTPUT DESCRIPTION AND FORMATTING"): device, processor, sequence, seconds, process,
//! action, RWBS, and for requests `sector + sectors`.

use weir_block::RequestKind;

use super::requests::{ImportError, Trace, Traced, wrong_line};

const SECTOR: u64 = 512;

/// The action that counts as a request: queued by the block layer, before merging and splitting.
const QUEUED: &str = "Q";

/// Whether the first line that is not empty looks like one of blkparse's.
pub(super) fn is_blkparse(text: &str) -> bool {
    text.lines().find(|line| !line.trim().is_empty()).is_some_and(|line| fields(line).is_some())
}

struct Fields<'a> {
    device: &'a str,
    seconds: &'a str,
    action: &'a str,
    rwbs: &'a str,
    rest: Vec<&'a str>,
}

/// The columns of an event; `None` for other lines (summaries, messages).
fn fields(line: &str) -> Option<Fields<'_>> {
    let mut words = line.split_whitespace();
    let device = words.next()?;
    let (major, minor) = device.split_once(',')?;
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number(major) || !is_number(minor) || !is_number(words.next()?) || !is_number(words.next()?) {
        return None;
    }
    let seconds = words.next()?;
    let (_process, action, rwbs) = (words.next()?, words.next()?, words.next()?);
    Some(Fields { device, seconds, action, rwbs, rest: words.collect() })
}

/// Reads the queued requests; skips other lines.
pub(super) fn read(text: &str) -> Result<Trace, ImportError> {
    let mut trace = Trace::new(true);
    for (number, line) in (1..).zip(text.lines()) {
        let Some(event) = fields(line).filter(|event| event.action == QUEUED) else { continue };
        let wrong = |reason: &str| wrong_line(number, line, reason);
        let at = nanoseconds(event.seconds).ok_or_else(|| wrong("the time is not seconds and a fraction"))?;
        let Some(kind) = kind(event.rwbs) else { continue };
        let (sector, sectors) = match event.rest[..] {
            [sector, "+", sectors, ..] => (sector.parse::<u64>().ok(), sectors.parse::<u64>().ok()),
            // A flush has no offset.
            _ if kind == RequestKind::Flush => (Some(0), Some(0)),
            _ => return Err(wrong("`<sector> + <sectors>` is expected after the action")),
        };
        let (sector, sectors) = sector.zip(sectors).ok_or_else(|| wrong("the sectors are not numbers"))?;
        let (offset, length) = (sector.saturating_mul(SECTOR), sectors.saturating_mul(SECTOR));
        trace.push(event.device, Traced::new(at, kind, offset, length).map_err(wrong)?);
    }
    Ok(trace)
}

/// RWBS: an optional F (flush first), then R, W, D (discard) or N (nothing), then flags that are irrelevant here.
fn kind(rwbs: &str) -> Option<RequestKind> {
    match rwbs.as_bytes() {
        [b'R', ..] => Some(RequestKind::Read),
        [b'W', ..] | [b'F', b'W', ..] => Some(RequestKind::Write),
        [b'D', ..] => Some(RequestKind::Discard),
        [b'F', ..] => Some(RequestKind::Flush),
        _ => None,
    }
}

fn nanoseconds(text: &str) -> Option<u64> {
    let (seconds, fraction) = text.split_once('.')?;
    let digits = fraction.len();
    if digits == 0 || digits > 9 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let fraction = fraction.parse::<u64>().ok()? * 10u64.pow(9 - digits as u32);
    Some(seconds.parse::<u64>().ok()?.saturating_mul(1_000_000_000).saturating_add(fraction))
}
