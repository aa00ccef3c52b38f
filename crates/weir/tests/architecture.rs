//! Checks the structure that ARCHITECTURE.md describes: a crate uses only crates below it, and no module of a crate depends on
//! itself through others.
//!
//! Reads the sources as text. A module is a file; it depends on another if it names something that the other defines, whichever
//! module re-exports the name in between. Unit tests do not count: they may use all that they test.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn crates() -> BTreeMap<String, PathBuf> {
    let entries = fs::read_dir(workspace().join("crates")).expect("the workspace has crates");
    let folders = entries.map(|entry| entry.expect("a readable directory").path());
    folders
        .filter(|path| path.join("Cargo.toml").exists())
        .map(|path| (path.file_name().expect("it has a name").to_string_lossy().into_owned(), path))
        .collect()
}

#[test]
fn no_modules_of_a_crate_form_a_circle() {
    let circles: Vec<String> = crates()
        .iter()
        .flat_map(|(name, path)| {
            let sources = Sources::read(&path.join("src"));
            sources.circles().into_iter().map(move |circle| format!("{name}:\n{circle}"))
        })
        .collect();
    assert!(circles.is_empty(), "modules that depend on each other:\n{}", circles.join("\n"));
}

/// A test of the check: cycles that it must find, and a graph without one.
#[test]
fn planted_circles_are_found() {
    let circles = |texts: &[(&str, &str)]| {
        let module = |(route, text): &(&str, &str)| {
            let parts = route.split('/').filter(|part| !part.is_empty()).map(str::to_owned);
            (parts.collect(), format!("{route}.rs"), (*text).to_owned())
        };
        Sources::of(texts.iter().map(module).collect()).circles()
    };
    let two = circles(&[
        ("", ""),
        ("a", "use crate::b::B; pub struct A;"),
        ("b", "pub struct B; fn f(_: super::a::A) {}"),
    ]);
    assert_eq!(two, ["  a.rs -> b.rs: B\n  b.rs -> a.rs: A\n"]);
    let renamed = [
        ("", "pub use a::A;"),
        ("a", "use crate::b; pub struct A(b::B);"),
        ("b", "use crate::A as C; pub struct B(C);"),
    ];
    assert_eq!(circles(&renamed).len(), 1, "through a re-export and an imported module");
    let folders = [
        ("", ""),
        ("a", ""),
        ("a/x", "use crate::b::{y::Y, z}; pub struct X;"),
        ("a/w", "pub struct W;"),
        ("b", ""),
        ("b/y", "pub struct Y;"),
        ("b/z", "use crate::a::w::W; pub fn f() {}"),
    ];
    assert_eq!(
        circles(&folders),
        ["  a/x.rs -> b/y.rs: Y\n  b/z.rs -> a/w.rs: W\n"],
        "of modules, though of no files"
    );
    let none = [
        ("", "mod a; mod b; use a::A; pub struct Root(A);"),
        ("a", "use crate::Root; pub struct A; #[cfg(test)] mod tests { use crate::b::B; }"),
        (
            "b",
            "pub struct B; // crate::a::A is a comment\nfn f(_: crate::a::A) -> &'static str { \"crate::b::B\" }",
        ),
    ];
    assert_eq!(circles(&none), Vec::<String>::new());
}

#[test]
fn a_crate_uses_only_crates_below_it() {
    let text = fs::read_to_string(workspace().join("ARCHITECTURE.md")).expect("it is there");
    let order = crate_order(&text);
    let position = |name: &str| order.iter().position(|one| one == name);
    let mut wrong = Vec::new();
    for (name, path) in crates() {
        let Some(mine) = position(&name) else {
            wrong.push(format!("{name}: not in the list of crates in ARCHITECTURE.md"));
            continue;
        };
        let manifest = fs::read_to_string(path.join("Cargo.toml")).expect("every crate has one");
        for used in dependencies(&manifest) {
            if position(&used).is_none_or(|theirs| theirs <= mine) {
                wrong.push(format!("{name} uses {used}, which ARCHITECTURE.md does not list below it"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(order.len() > 10, "the list was read: {order:?}");
}

/// The crates in the order of the section "Crates", top first.
fn crate_order(architecture: &str) -> Vec<String> {
    let section = architecture.split("\n## Crates\n").nth(1).expect("there is a section on crates");
    let section = section.split("\n## ").next().unwrap_or(section);
    let names = section.lines().filter_map(|line| line.strip_prefix("- **`")?.split('`').next());
    names.map(str::to_owned).collect()
}

/// Crates of this workspace that a manifest names as dependencies. Those of tests do not count.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut within = false;
    let mut found = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            within = line == "[dependencies]" || line.ends_with("build-dependencies]");
        } else if within && line.starts_with("weir") {
            found.extend(line.split(['.', ' ', '=']).next().map(str::to_owned));
        }
    }
    found
}

/// A path of modules and a name, as written from the root of a crate on.
type Route = Vec<String>;

/// One file.
#[derive(Default)]
struct Source {
    file: String,
    /// Names that it defines.
    defines: BTreeSet<String>,
    /// Names that it imports, with their sources.
    imports: BTreeMap<String, Route>,
    /// Modules from which it imports everything.
    globs: Vec<Route>,
    /// The items of its own crate that it names.
    uses: Vec<Route>,
}

/// The modules of a crate.
struct Sources(BTreeMap<Route, Source>);

impl Sources {
    fn read(root: &Path) -> Sources {
        let mut files = Vec::new();
        collect(root, &mut Vec::new(), &mut files);
        let read = |(route, path): (Route, PathBuf)| {
            let text = fs::read_to_string(&path).expect("a source file is text");
            (route, path.strip_prefix(root).expect("it is below").display().to_string(), text)
        };
        Sources::of(files.into_iter().map(read).collect())
    }

    /// Builds the sources from route, file and text of each module.
    fn of(files: Vec<(Route, String, String)>) -> Sources {
        let names: BTreeSet<Route> = files.iter().map(|(route, ..)| route.clone()).collect();
        let read = |(route, file, text): (Route, String, String)| {
            let source = Reader::read(&text, &route, &names, file);
            (route, source)
        };
        Sources(files.into_iter().map(read).collect())
    }

    /// The module that defines the item named by `route`.
    fn definition(&self, route: &[String], depth: usize) -> Option<&Route> {
        let length = (0..=route.len()).rev().find(|length| self.0.contains_key(&route[..*length]))?;
        let (module, source) = self.0.get_key_value(&route[..length])?;
        let name = route.get(length)?;
        if source.defines.contains(name) || depth == 0 {
            return Some(module);
        }
        if let Some(import) = source.imports.get(name) {
            let whole: Route = import.iter().chain(&route[length + 1..]).cloned().collect();
            return self.definition(&whole, depth - 1);
        }
        let through = |glob: &Route| {
            let whole: Route = glob.iter().chain(&route[length..]).cloned().collect();
            let found = self.definition(&whole, depth - 1)?;
            self.0[found].defines.contains(name).then_some(found)
        };
        source.globs.iter().find_map(through).or(Some(module))
    }

    /// References between sibling modules: an edge between two files counts for the sibling modules that they are in. A
    /// module and those below it are one here: a child may name its parents' items.
    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (module, source) in &self.0 {
            for used in &source.uses {
                let Some(target) = self.definition(used, 8) else { continue };
                let common = module.iter().zip(target).take_while(|(one, other)| one == other).count();
                if common < module.len().min(target.len()) {
                    let (from, to) = (module[..=common].to_vec(), target[..=common].to_vec());
                    let files = format!("{} -> {}", source.file, self.0[target].file);
                    let named = edges.entry(from).or_default().entry(to).or_default();
                    named.entry(files).or_default().extend(used.last().cloned());
                }
            }
        }
        edges
    }

    /// One text for each cycle: the lines of its edges.
    fn circles(&self) -> Vec<String> {
        let edges = self.edges();
        let reachable = |start: &Route| {
            let (mut seen, mut open) = (BTreeSet::new(), vec![start.clone()]);
            while let Some(next) = open.pop() {
                let targets = edges.get(&next).into_iter().flat_map(BTreeMap::keys);
                open.extend(targets.filter(|one| seen.insert((*one).clone())).cloned());
            }
            seen
        };
        let reach: BTreeMap<&Route, BTreeSet<Route>> =
            edges.keys().map(|from| (from, reachable(from))).collect();
        let mut circles = BTreeSet::new();
        for (module, seen) in reach.iter().filter(|(module, seen)| seen.contains(**module)) {
            let within =
                |one: &Route| seen.contains(one) && reach.get(one).is_some_and(|back| back.contains(*module));
            let tied = edges.iter().filter(|(from, _)| within(from)).flat_map(|(_, targets)| targets.iter());
            let tied = tied.filter(|(to, _)| within(to)).flat_map(|(_, files)| files.iter());
            let told = tied.map(|(files, names)| {
                format!("  {files}: {}\n", names.iter().map(String::as_str).collect::<Vec<_>>().join(", "))
            });
            circles.insert(told.collect::<String>());
        }
        circles.into_iter().collect()
    }
}

/// From a module to a sibling: the files and the names of each edge.
type Edges = BTreeMap<Route, BTreeMap<Route, BTreeMap<String, BTreeSet<String>>>>;

/// The modules below a folder of sources. Programs in `bin` are crates of their own, as is `main.rs` beside a `lib.rs`.
fn collect(folder: &Path, route: &mut Route, files: &mut Vec<(Route, PathBuf)>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries {
        let path = entry.expect("a readable directory").path();
        let stem = path.file_stem().expect("it has a name").to_string_lossy().into_owned();
        let top = route.is_empty();
        if stem == "tests" || top && (stem == "bin" || stem == "main" && folder.join("lib.rs").exists()) {
            continue;
        }
        if path.is_dir() {
            route.push(stem);
            collect(&path, route, files);
            route.pop();
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let mut module = route.clone();
            if !(stem == "mod" || top && (stem == "lib" || stem == "main")) {
                module.push(stem);
            }
            files.push((module, path));
        }
    }
}

/// Reads the tokens of one file.
struct Reader<'a> {
    tokens: Vec<String>,
    module: &'a Route,
    modules: &'a BTreeSet<Route>,
    source: Source,
}

impl Reader<'_> {
    fn read(text: &str, module: &Route, modules: &BTreeSet<Route>, file: String) -> Source {
        let source = Source { file, ..Source::default() };
        let mut reader = Reader { tokens: without_tests(tokens(text)), module, modules, source };
        // First: a path may begin with a module that is imported further down.
        reader.imports();
        reader.paths();
        reader.source
    }

    /// The `use` items, and the names that are defined.
    fn imports(&mut self) {
        let mut at = 0;
        while at < self.tokens.len() {
            let next = self.tokens.get(at + 1).cloned().unwrap_or_default();
            match self.tokens[at].as_str() {
                "use" if next != "<" => {
                    at += 1;
                    self.tree(&mut at, &mut Vec::new());
                }
                "struct" | "enum" | "trait" | "type" | "fn" | "const" | "static" | "union"
                | "macro_rules" => {
                    let name =
                        if next == "!" { self.tokens.get(at + 2).cloned().unwrap_or_default() } else { next };
                    self.source.defines.insert(name);
                    at += 1;
                }
                _ => at += 1,
            }
        }
    }

    fn tree(&mut self, at: &mut usize, prefix: &mut Route) {
        let depth = prefix.len();
        loop {
            let token = self.tokens.get(*at).cloned().unwrap_or_default();
            *at += 1;
            match token.as_str() {
                "::" => continue,
                "{" => {
                    while self.tokens.get(*at).is_some_and(|token| token != "}") {
                        self.tree(at, &mut prefix.clone());
                        if self.tokens.get(*at).is_some_and(|token| token == ",") {
                            *at += 1;
                        }
                    }
                    *at += 1;
                    return prefix.truncate(depth);
                }
                "*" => {
                    self.source.globs.extend(self.absolute(prefix));
                    return prefix.truncate(depth);
                }
                _ => prefix.push(token),
            }
            let after = self.tokens.get(*at).map_or("", String::as_str);
            if after != "::" {
                let mut name = prefix.last().cloned().unwrap_or_default();
                if name == "self" && prefix.len() > 1 {
                    prefix.pop();
                    name = prefix.last().cloned().unwrap_or_default();
                }
                if after == "as" {
                    name = self.tokens.get(*at + 1).cloned().unwrap_or_default();
                    *at += 2;
                }
                if let Some(route) = self.absolute(prefix) {
                    self.source.uses.push(route.clone());
                    self.source.imports.insert(name, route);
                }
                return prefix.truncate(depth);
            }
        }
    }

    /// Paths in the code.
    fn paths(&mut self) {
        let mut at = 0;
        while at < self.tokens.len() {
            let begins = at == 0 || self.tokens[at - 1] != "::" && self.tokens[at - 1] != ".";
            let mut path = Vec::new();
            if begins && is_name(&self.tokens[at]) {
                path.push(self.tokens[at].clone());
                while self.tokens.get(at + 1).is_some_and(|token| token == "::")
                    && self.tokens.get(at + 2).is_some_and(|token| is_name(token))
                {
                    path.push(self.tokens[at + 2].clone());
                    at += 2;
                }
            }
            if path.len() > 1 {
                self.source.uses.extend(self.absolute(&path));
            }
            at += 1;
        }
    }

    /// A path from the root of this crate on; `None` for one that leaves it.
    fn absolute(&self, path: &[String]) -> Option<Route> {
        let (first, rest) = path.split_first()?;
        let mut route = match first.as_str() {
            "crate" => Vec::new(),
            "self" => self.module.clone(),
            "super" => self.module[..self.module.len().checked_sub(1)?].to_vec(),
            name => {
                let mut child = self.module.clone();
                child.push(name.to_owned());
                if self.modules.contains(&child) { child } else { self.source.imports.get(name)?.clone() }
            }
        };
        for part in rest {
            if part == "super" {
                route.pop();
            } else {
                route.push(part.clone());
            }
        }
        Some(route)
    }
}

fn is_name(token: &str) -> bool {
    token.starts_with(|first: char| first.is_alphabetic() || first == '_')
}

/// Names, `::` and single other characters; no comments, no text in quotes.
fn tokens(text: &str) -> Vec<String> {
    let text: Vec<char> = text.chars().collect();
    let (mut found, mut at) = (Vec::new(), 0);
    let after = |from: usize, what: &[char]| {
        (from..text.len()).find(|at| text[*at..].starts_with(what)).map_or(text.len(), |at| at + what.len())
    };
    while at < text.len() {
        let rest = &text[at..];
        if rest.starts_with(&['/', '/']) {
            at = after(at, &['\n']);
        } else if rest.starts_with(&['/', '*']) {
            at = after(at, &['*', '/']);
        } else if rest.starts_with(&['r', '"']) {
            at = after(at + 2, &['"']);
        } else if rest.starts_with(&['r', '#', '"']) {
            at = after(at + 3, &['"', '#']);
        } else if rest[0] == '"' {
            at += 1;
            while at < text.len() && text[at] != '"' {
                at += if text[at] == '\\' { 2 } else { 1 };
            }
            at += 1;
        } else if rest[0] == '\'' && (rest.get(1) == Some(&'\\') || rest.get(2) == Some(&'\'')) {
            // A character literal; any other token after a quote is a lifetime.
            at = after(at + 3, &['\'']).max(at + 3).min(if rest.get(2) == Some(&'\'') {
                at + 3
            } else {
                usize::MAX
            });
        } else if rest[0].is_alphanumeric() || rest[0] == '_' {
            let length = rest.iter().take_while(|one| one.is_alphanumeric() || **one == '_').count();
            found.push(rest[..length].iter().collect());
            at += length;
        } else if rest.starts_with(&[':', ':']) {
            found.push("::".into());
            at += 2;
        } else {
            if !rest[0].is_whitespace() {
                found.push(rest[0].to_string());
            }
            at += 1;
        }
    }
    found
}

/// Leaves out the items under `#[cfg(test)]`.
fn without_tests(tokens: Vec<String>) -> Vec<String> {
    const MARK: [&str; 7] = ["#", "[", "cfg", "(", "test", ")", "]"];
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        if !tokens[at..].iter().map(String::as_str).take(MARK.len()).eq(MARK) {
            kept.push(tokens[at].clone());
            at += 1;
            continue;
        }
        // To the end of the item: a semicolon, or the brace that closes its body.
        let mut depth = 0;
        at += MARK.len();
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token.as_str() {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            if depth == 0 && (token == ";" || token == "}") {
                break;
            }
        }
    }
    kept
}
