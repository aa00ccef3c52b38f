//! `weir diagnose --import`: rows from other tools.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use weir_diagnose::import::LARGEST_FILE;
use weir_diagnose::{Import, Threshold};

use super::files::Outcome;
use crate::failure::Failure;

/// Reads tables (`FILE`) and layers (`LAYER=FILE`), in the order given, and writes the report.
pub fn import(files: &[String], report: &Path, thresholds: &[Threshold]) -> Result<Outcome, Failure> {
    let mut import = Import::default();
    for argument in files {
        import = match argument.split_once('=').filter(|_| !Path::new(argument).exists()) {
            Some((layer, file)) => import.layer(layer.trim(), file, &read(file)?),
            None => import.csv(argument, &read(argument)?),
        }
        .map_err(Failure::usage)?;
    }
    let title =
        Path::new(&files[0]).file_stem().map_or_else(|| "imported".into(), |stem| stem.to_string_lossy());
    let title = title.split_once('=').map_or(title.as_ref(), |(_, file)| file);
    let diagnosis = import.into_diagnosis(title, std::env::args()).map_err(Failure::usage)?;
    Outcome::write(diagnosis, report, thresholds)
}

fn read(path: &str) -> Result<String, Failure> {
    let wrong = |problem: String| Failure::usage(format!("{path}: {problem}"));
    let file = File::open(path).map_err(|error| Failure::unreadable(Path::new(path), &error))?;
    let mut bytes = Vec::new();
    file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(|error| wrong(error.to_string()))?;
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(wrong(format!("larger than {} MiB", LARGEST_FILE >> 20)));
    }
    text_of(bytes).ok_or_else(|| wrong("not text in UTF-8 or UTF-16".to_owned()))
}

/// PowerShell redirects into UTF-16.
fn text_of(bytes: Vec<u8>) -> Option<String> {
    if let Some(rest) = bytes.strip_prefix(&[0xff, 0xfe]) {
        let units: Vec<u16> =
            rest.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        return String::from_utf16(&units).ok();
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_as_programs_write_it() {
        assert_eq!(text_of(b"a,b".to_vec()).as_deref(), Some("a,b"));
        assert_eq!(text_of(vec![0xff, 0xfe, b'a', 0, b'b', 0]).as_deref(), Some("ab"));
        assert_eq!(text_of(vec![0x80]), None);
    }
}
