//! fio's I/O logs, versions 2 and 3 (fio's documentation, "Trace file format"): `file action [offset length]`, in version 3
//! with the time before it, which fio writes and replays in microseconds. Version 2 has no times but `wait`, in microseconds.

use weir_block::RequestKind;

use super::requests::{ImportError, Trace, Traced, wrong_line};

pub(super) fn read(text: &str) -> Result<Trace, ImportError> {
    let mut lines = (1..).zip(text.lines());
    let (_, header) = lines.next().unwrap_or((1, ""));
    let timed = match header.trim() {
        "fio version 2 iolog" => false,
        "fio version 3 iolog" => true,
        _ => return Err(wrong_line(1, header, "versions 2 and 3 are known")),
    };
    let mut trace = Trace::new(timed);
    let mut waited = 0u64;
    for (number, line) in lines {
        let wrong = |reason: &str| wrong_line(number, line, reason);
        let words: Vec<&str> = line.split_whitespace().collect();
        let (at, words) = match (&words[..], timed) {
            ([], _) => continue,
            ([time, rest @ ..], true) => {
                let time = time.parse::<u64>().ok().map(|micros| micros.saturating_mul(1_000));
                (time.ok_or_else(|| wrong("the line does not begin with microseconds"))?, rest)
            }
            (rest, false) => (waited, rest),
        };
        let (file, action, range) = match words {
            [file, action] => (*file, *action, None),
            [file, action, offset, length] => {
                let range = offset.parse::<u64>().ok().zip(length.parse::<u64>().ok());
                (*file, *action, Some(range.ok_or_else(|| wrong("offset and length are not numbers"))?))
            }
            _ => return Err(wrong("a file, an action, and an offset and a length are expected")),
        };
        let kind = match action {
            "read" => RequestKind::Read,
            "write" => RequestKind::Write,
            "trim" => RequestKind::Discard,
            "sync" | "datasync" | "sync_file_range" => RequestKind::Flush,
            "add" | "open" | "close" => continue,
            "wait" => {
                let (micros, _) = range.ok_or_else(|| wrong("wait needs microseconds"))?;
                waited = waited.saturating_add(micros.saturating_mul(1_000));
                trace.timed = true;
                continue;
            }
            _ => return Err(wrong("the action is not known")),
        };
        let (offset, length) = match (kind, range) {
            (RequestKind::Flush, _) => (0, 0),
            (_, Some(range)) => range,
            _ => return Err(wrong("an offset and a length are missing")),
        };
        trace.push(file, Traced::new(at, kind, offset, length).map_err(wrong)?);
    }
    Ok(trace)
}
