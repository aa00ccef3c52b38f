//! The machine that measured, and how to measure again.

use std::collections::BTreeMap;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The data that a reader needs to judge the numbers, and to reproduce them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    /// The disk that was measured.
    pub disk: String,
    /// The node that measured.
    pub node: String,
    /// The start, in seconds since 1970 (UTC).
    #[serde(rename = "started_unix_seconds")]
    pub started_unix: u64,
    /// The kernel's release.
    pub kernel: String,
    /// The processor's model.
    pub cpu: String,
    /// Logical processors that this process may use.
    pub cores: usize,
    /// Main memory, in bytes.
    pub memory_bytes: u64,
    /// The scaling governor of the first processor; absent where frequency is not the kernel's business.
    pub governor: Option<String>,
    /// The one-minute load average at the start: the machine's other work.
    pub load_average: f64,
    /// The exact command that repeats the measurement.
    pub command: String,
    /// Files that the rows came from, when nothing was measured here. The facts about the machine are then those
    /// of the machine that read them.
    #[serde(default)]
    pub imported_from: Vec<String>,
    /// Programs that took part, and their versions.
    pub versions: BTreeMap<String, String>,
}

impl Environment {
    /// Describes this machine, now. `command` is the argument vector of a run that repeats this one.
    ///
    /// A value that the machine does not report is `unknown` or 0, never an error: a measurement must not fail because
    /// `/proc` looks unusual.
    #[must_use]
    pub fn here<S: AsRef<str>>(disk: &str, node: &str, command: impl IntoIterator<Item = S>) -> Environment {
        let cpuinfo = read("/proc/cpuinfo");
        Environment {
            disk: disk.to_owned(),
            node: node.to_owned(),
            started_unix: now_unix(),
            kernel: or_unknown(read("/proc/sys/kernel/osrelease").trim()),
            cpu: or_unknown(field(&cpuinfo, "model name").or(field(&cpuinfo, "Model")).unwrap_or_default()),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: memory_bytes(&read("/proc/meminfo")),
            governor: Some(read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").trim().to_owned())
                .filter(|governor| !governor.is_empty()),
            load_average: read("/proc/loadavg")
                .split_whitespace()
                .next()
                .and_then(|first| first.parse().ok())
                .unwrap_or(0.0),
            command: command_line(command),
            imported_from: Vec::new(),
            versions: BTreeMap::new(),
        }
    }

    /// The start, as `2025-11-21 20:11:05 UTC`.
    #[must_use]
    pub fn started(&self) -> String {
        let (days, seconds) = (self.started_unix / 86_400, self.started_unix % 86_400);
        let (year, month, day) = civil_date(days);
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
    }
}

/// Joins arguments to a line that a POSIX shell splits into the same arguments.
#[must_use]
pub fn command_line<S: AsRef<str>>(arguments: impl IntoIterator<Item = S>) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    let quoted = arguments.into_iter().map(|argument| {
        let argument = argument.as_ref();
        if !argument.is_empty() && argument.chars().all(plain) {
            argument.to_owned()
        } else {
            format!("'{}'", argument.replace('\'', r"'\''"))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

#[expect(clippy::disallowed_methods, reason = "for people to read; nothing is decided by it")]
fn now_unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn or_unknown(text: &str) -> String {
    if text.is_empty() { "unknown".to_owned() } else { text.to_owned() }
}

/// The value of the first `key : value` line.
fn field<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.trim() == key)
        .map(|(_, v)| v.trim())
}

fn memory_bytes(meminfo: &str) -> u64 {
    let kib =
        field(meminfo, "MemTotal").and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
///
/// Walks over years and months, not a closed formula: it is called once per report.
fn civil_date(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // 400 years always have the same number of days; this bounds the walk for any input.
    const DAYS_IN_400_YEARS: u64 = 146_097;
    let mut year = 1970 + 400 * (days / DAYS_IN_400_YEARS);
    days %= DAYS_IN_400_YEARS;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let here = Environment::here("db1", "n1", ["weir", "diagnose", "--disk", "db1"]);
        assert_ne!(here.kernel, "unknown");
        assert!(here.cores >= 1);
        assert!(here.memory_bytes > 1 << 20);
        assert!(here.started_unix > 1_700_000_000);
        assert_eq!(here.command, "weir diagnose --disk db1");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        let date = |days| civil_date(days);
        assert_eq!(date(0), (1970, 1, 1));
        assert_eq!(date(59), (1970, 3, 1));
        assert_eq!(date(11_016), (2000, 2, 29));
        assert_eq!(date(19_782), (2024, 2, 29));
        assert_eq!(date(20_454), (2026, 1, 1));
        assert_eq!(date(146_097), (2370, 1, 1));
        let mut environment = Environment::here("d", "n", ["x"]);
        environment.started_unix = 1_700_000_000;
        assert_eq!(environment.started(), "2023-11-14 22:13:20 UTC");
    }

    #[test]
    fn the_command_survives_a_shell() {
        let arguments = ["weir", "diagnose", "--disk", "it's a disk", "--seed=7", "", "$HOME"];
        let line = command_line(arguments);
        assert_eq!(line, r"weir diagnose --disk 'it'\''s a disk' --seed=7 '' '$HOME'");
        let output = std::process::Command::new("sh")
            .arg("-c")
            .arg(format!("printf '%s\\n' {line}"))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap().lines().collect::<Vec<_>>(), arguments);
    }
}
