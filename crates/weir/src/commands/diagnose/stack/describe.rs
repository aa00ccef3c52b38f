//! The description of a stack: layers from the bottom up, the access to each, and its counters.

use std::path::Path;

use serde::Deserialize;
use toml::Spanned;
use weir_load::target::Target;
use weir_node::shard::messages::LoadLayer;

/// A layer of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// Unique in the file.
    pub name: String,
    /// Line of its description, from 1.
    pub line: usize,
    /// The load's access to it.
    pub reach: Reach,
    /// A block device whose statistics are sampled: its name in `/sys/class/block`.
    pub device: Option<String>,
    /// A network interface whose bytes are counted.
    pub interface: Option<String>,
    /// Processes whose processor time is sampled.
    pub pids: Vec<u32>,
}

/// The load's access to a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The generator opens it: a file, a block device, an NBD export.
    Target(Target),
    /// A layer inside the node that has a disk open.
    Disk {
        /// The disk.
        disk: String,
        /// The layer.
        at: LoadLayer,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    layer: Vec<Spanned<Raw>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    name: Spanned<String>,
    target: Option<Spanned<String>>,
    disk: Option<String>,
    at: Option<At>,
    device: Option<Spanned<String>>,
    interface: Option<Spanned<String>>,
    #[serde(default)]
    pids: Vec<Spanned<u32>>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum At {
    Backing,
    Accel,
}

/// Reads a description; an error names the defect and its line.
pub fn describe(file: &Path, text: &str) -> Result<Vec<Described>, String> {
    // The text of its errors has line, column and the line itself.
    let document: Document = toml::from_str(text).map_err(|error| format!("{}: {error}", file.display()))?;
    let reader = Reader { file, text };
    let layers: Vec<Described> =
        document.layer.into_iter().map(|layer| reader.layer(layer)).collect::<Result<_, _>>()?;
    if layers.len() < 2 {
        return Err(format!(
            "{}: {} layers: name at least two, from the bottom up, each under [[layer]]",
            file.display(),
            layers.len()
        ));
    }
    for (place, layer) in layers.iter().enumerate() {
        if let Some(first) = layers[..place].iter().find(|first| first.name == layer.name) {
            let (name, line) = (&layer.name, first.line);
            return Err(format!(
                "{}, line {}: there is a layer {name:?} in line {line} already",
                file.display(),
                layer.line
            ));
        }
    }
    Ok(layers)
}

struct Reader<'a> {
    file: &'a Path,
    text: &'a str,
}

impl Reader<'_> {
    fn line(&self, at: usize) -> usize {
        1 + self.text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count()
    }

    fn wrong<T>(&self, at: usize, what: &str) -> Result<T, String> {
        Err(format!("{}, line {}: {what}", self.file.display(), self.line(at)))
    }

    fn layer(&self, layer: Spanned<Raw>) -> Result<Described, String> {
        let (start, raw) = (layer.span().start, layer.into_inner());
        let name_at = raw.name.span().start;
        if raw.name.get_ref().trim().is_empty() {
            return self.wrong(name_at, "a layer needs a name");
        }
        let reach = match (raw.target, raw.disk, raw.at) {
            (Some(target), None, None) => self.target(&target)?,
            (None, Some(disk), Some(at)) => {
                let at = match at {
                    At::Backing => LoadLayer::Backing,
                    At::Accel => LoadLayer::Accel,
                };
                Reach::Disk { disk, at }
            }
            _ => {
                return self.wrong(
                    name_at,
                    "a layer has either a target (a file, a block device, nbd://…, nbd+unix://…) or disk and at \
                     (\"backing\" or \"accel\")",
                );
            }
        };
        let device = raw.device.map(|device| self.known(device, "/sys/class/block", "block device"));
        let interface =
            raw.interface.map(|interface| self.known(interface, "/sys/class/net", "network interface"));
        Ok(Described {
            name: raw.name.into_inner(),
            line: self.line(start),
            reach,
            device: device.transpose()?,
            interface: interface.transpose()?,
            pids: raw.pids.into_iter().map(|pid| self.process(&pid)).collect::<Result<_, _>>()?,
        })
    }

    fn target(&self, text: &Spanned<String>) -> Result<Reach, String> {
        let at = text.span().start;
        match text.get_ref().parse() {
            Ok(Target::Null { .. }) => self.wrong(at, "null is no layer: it keeps nothing"),
            Ok(target) => Ok(Reach::Target(target)),
            Err(error) => self.wrong(at, &error.to_string()),
        }
    }

    /// The name of an object with a directory in the kernel's filesystem. `/dev/sda` counts as `sda`.
    fn known(&self, name: Spanned<String>, directory: &str, what: &str) -> Result<String, String> {
        let (at, name) = (name.span().start, name.into_inner());
        let name = name.strip_prefix("/dev/").map_or(name.clone(), str::to_owned);
        if !name.is_empty() && !name.contains('/') && Path::new(directory).join(&name).exists() {
            return Ok(name);
        }
        self.wrong(at, &format!("there is no {what} {name:?}; ls {directory} lists them"))
    }

    fn process(&self, pid: &Spanned<u32>) -> Result<u32, String> {
        let id = *pid.get_ref();
        if Path::new("/proc").join(id.to_string()).exists() {
            return Ok(id);
        }
        self.wrong(pid.span().start, &format!("there is no process {id}"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Described>, String> {
        describe(Path::new("stack.toml"), text)
    }

    const TWO: &str = "# from the bottom\n[[layer]]\nname = \"low\"\ntarget = \"/tmp/a\"\n\n\
                       [[layer]]\nname = \"high\"\ntarget = \"nbd://127.0.0.1:10809/a\"\n";

    #[test]
    fn layers_are_read_from_the_bottom() {
        let text = format!(
            "{TWO}interface = \"lo\"\npids = [{}]\n[[layer]]\nname = \"top\"\ndisk = \"db\"\nat = \"accel\"\n",
            std::process::id()
        );
        let layers = read(&text).unwrap();
        assert_eq!(
            layers.iter().map(|layer| layer.name.as_str()).collect::<Vec<_>>(),
            ["low", "high", "top"]
        );
        assert_eq!((layers[0].line, layers[1].line), (2, 6));
        assert_eq!(layers[0].reach, Reach::Target(Target::Path("/tmp/a".into())));
        assert!(matches!(layers[1].reach, Reach::Target(Target::Nbd(_))));
        assert_eq!((layers[1].interface.as_deref(), layers[1].pids.len()), (Some("lo"), 1));
        assert_eq!(layers[2].reach, Reach::Disk { disk: "db".into(), at: LoadLayer::Accel });
    }

    #[test]
    fn errors_name_the_line_and_what_to_do() {
        let wrong = |text: &str, line: usize, words: &str| {
            let said = read(text).unwrap_err();
            assert!(said.contains(&format!("line {line}")) && said.contains(words), "{said}");
        };
        wrong("[[layer]]\nname = \"a\"\ntraget = \"x\"\n", 3, "traget");
        wrong(&format!("{TWO}target = \"x\"\n"), 9, "duplicate key");
        wrong("[[layer]]\nname = \"a\"\n", 2, "either a target");
        wrong("[[layer]]\nname = \"a\"\ntarget = \"null\"\n", 3, "keeps nothing");
        wrong("[[layer]]\nname = \"a\"\n\ntarget = \"nbd://h:port/\"\n", 4, "nbd://h:port/");
        wrong("[[layer]]\nname = \" \"\ntarget = \"x\"\n", 2, "needs a name");
        wrong(&format!("{TWO}device = \"nvme99n1\"\n"), 9, "no block device \"nvme99n1\"");
        wrong(&format!("{TWO}device = \"../net/lo\"\n"), 9, "no block device");
        wrong(&format!("{TWO}interface = \"none0\"\n"), 9, "no network interface");
        wrong(&format!("{TWO}pids = [0]\n"), 9, "no process 0");
        wrong(&TWO.replace("high", "low"), 6, "in line 2 already");
        assert!(read("[[layer]]\nname = \"a\"\ntarget = \"x\"\n").unwrap_err().contains("at least two"));
        assert!(read("").unwrap_err().contains("layer"));
    }
}
