//! A working environment for the command line.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use weir_block::Nanos;

const WEIR: &str = env!("CARGO_BIN_EXE_weir");

/// A working directory, and the lab that a test may have started there.
pub struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Place {
        Place { directory: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(WEIR);
        command
            .args(line.split_whitespace())
            .current_dir(self.path())
            .env_remove("GLIBC_TUNABLES")
            .env_remove("WEIR_VECTOR_COPIES")
            .env_remove("WEIR_LAB")
            .env_remove("WEIR_API");
        command
    }

    pub fn weir(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    /// The output of a command that must succeed.
    pub fn ok(&self, line: &str) -> String {
        let output = self.weir(line);
        assert!(output.status.success(), "weir {line}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.ok(&format!("{line} --output json"))).unwrap()
    }

    /// The JSON output of a command line as given.
    pub fn parsed(&self, line: &str) -> Value {
        serde_json::from_str(&self.ok(line)).unwrap()
    }

    /// The error text of a command that must end with `code`.
    pub fn fails(&self, line: &str, code: i32) -> String {
        let output = self.weir(line);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "weir {line}: {said}");
        said
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path().join(name)).unwrap()
    }

    /// The ends of all logs. A test's failure on another machine is explained by what it printed, or not at all.
    fn print_logs(&self) {
        let lab = self.path().join("weir-lab");
        let homes =
            std::fs::read_dir(&lab).into_iter().flatten().flatten().map(|home| home.path().join("log"));
        let here = std::fs::read_dir(self.path()).into_iter().flatten().flatten().map(|file| file.path());
        let logs = here.filter(|file| file.extension().is_some_and(|it| it == "log"));
        for log in logs.chain([lab.join("registry.log")]).chain(homes) {
            let Ok(text) = std::fs::read_to_string(&log) else { continue };
            let lines: Vec<&str> = text.lines().collect();
            println!("the end of {}:\n{}", log.display(), lines[lines.len().saturating_sub(40)..].join("\n"));
        }
    }

    pub fn pool(&self) -> PathBuf {
        let pool = self.path().join("pool");
        std::fs::create_dir_all(&pool).unwrap();
        pool
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_logs();
        }
        if self.path().join("weir-lab/lab.json").exists() {
            // With force: a failed test may have left a backing that does not answer.
            self.weir("lab down --force");
        }
    }
}

/// Time limit of every wait.
pub const SOON: Duration = Duration::from_secs(40);

pub fn await_some<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Nanos::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Nanos::now() - start < SOON, "not within {SOON:?}: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A client that loads a disk of the place until it is dropped.
pub struct Guest(Child);

impl Guest {
    /// Reads through the export at `uri`; returns when the disk's owner counts it.
    pub fn of(place: &Place, disk: &str, uri: &str) -> Guest {
        let mut load = place.command(&format!("bench {uri} --runtime 60s"));
        let guest = Guest(load.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        await_some("a client of the disk", || {
            let shown = place.json(&format!("disk show {disk}"));
            shown["detail"]["clients"].as_u64().filter(|clients| *clients > 0)
        });
        guest
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `nbdkit` with `arguments` behind a socket, when it answers; SIGKILL when dropped.
pub struct Nbdkit(pub Child);

impl Nbdkit {
    pub fn start(socket: &Path, arguments: &[&str]) -> Nbdkit {
        // A killed server leaves its socket behind.
        let _ = std::fs::remove_file(socket);
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-U"]).arg(socket).args(arguments).stdin(Stdio::null()).stderr(Stdio::null());
        let server = Nbdkit(command.spawn().expect("the tests need nbdkit"));
        let mut tries = 1000;
        while std::os::unix::net::UnixStream::connect(socket).is_err() {
            tries -= 1;
            assert!(tries > 0, "nbdkit does not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
        server
    }

    pub fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        self.end();
    }
}

/// Asserts that keys and types of an answer are those of its schema in `shapes.json`.
pub fn assert_shape(answer: &Value, at: &str) {
    let written: Value = serde_json::from_str(include_str!("../shapes.json")).unwrap();
    let schema = answer["schema"].as_str().unwrap_or_else(|| panic!("{at} has no schema: {answer}"));
    assert!(written[schema].is_object(), "{at}: {schema} is not written down");
    compare(&written, &Value::from(schema), answer, at);
}

/// `shape` is a word (`string`, `number`, `bool`, a name in `written`), words with `|` between them, or a list of one.
fn compare(written: &Value, shape: &Value, found: &Value, at: &str) {
    if let Some(items) = shape.as_array() {
        let found = found.as_array().unwrap_or_else(|| panic!("{at}: no list: {found}"));
        return found.iter().for_each(|item| compare(written, &items[0], item, &format!("{at}[]")));
    }
    let words = shape.as_str().unwrap();
    let kind = match found {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    };
    let named = words.split('|').find_map(|word| written.get(word)).and_then(Value::as_object);
    let (Value::Object(found), Some(keys)) = (found, named) else {
        return assert!(words.split('|').any(|word| word == kind), "{at}: {kind}, and not {words}: {found}");
    };
    for (key, value) in found {
        let shape = keys.get(key).or_else(|| keys.get(&format!("{key}?")));
        let shape = shape.unwrap_or_else(|| panic!("{at}.{key} is not written down"));
        compare(written, shape, value, &format!("{at}.{key}"));
    }
    let missing: Vec<_> =
        keys.keys().filter(|key| !key.ends_with('?') && !found.contains_key(*key)).collect();
    assert!(missing.is_empty(), "{at} has no {missing:?}");
}
