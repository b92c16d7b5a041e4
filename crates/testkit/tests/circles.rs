//! Inside a crate the files stand on each other without circles.
//!
//! A file is a module. It stands on those that it imports, by the file that defines what it imports and not by one that
//! hands it on, and on its own parts (the files of the folder that has its name). What a part takes of the module that it
//! is a part of makes no circle: those two are one thing, as private items of the outer one are for its parts alone.
//! What is only for tests does not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The module of a file: `[]` is the crate's root, `["launch", "thread"]` is `launch/thread.rs`.
type Module = Vec<String>;

#[test]
fn files_of_a_crate_stand_on_each_other_without_circles() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut wrong = Vec::new();
    let mut looked_at = 0;
    for entry in fs::read_dir(crates).unwrap().map(Result::unwrap) {
        let src = entry.path().join("src");
        let files = sources(&src, &src);
        looked_at += files.len();
        let name = entry.file_name();
        let say = |c: Vec<Module>| format!("{}: {}", name.display(), show(&c));
        wrong.extend(circles(&files).into_iter().map(say));
    }
    assert!(looked_at > 400, "{looked_at} files: this test looks in the wrong place");
    assert!(wrong.is_empty(), "these files import each other:\n{}", wrong.join("\n"));
}

fn show(modules: &[Module]) -> String {
    modules.iter().map(|m| m.join("/")).collect::<Vec<_>>().join(", ")
}

/// The code of a crate by its modules.
fn sources(src: &Path, folder: &Path) -> BTreeMap<Module, String> {
    let mut found = BTreeMap::new();
    let paths = fs::read_dir(folder).into_iter().flatten().map(|e| e.unwrap().path());
    let (folders, files): (Vec<PathBuf>, Vec<PathBuf>) = paths.partition(|p| p.is_dir());
    for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "rs")) {
        let path = file.with_extension("");
        let parts = path.strip_prefix(src).unwrap().components();
        let mut module: Module = parts.map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
        if module.last().is_some_and(|m| ["mod", "lib", "main"].contains(&m.as_str())) {
            module.pop();
        }
        found.insert(module, code(&fs::read_to_string(file).unwrap()));
    }
    for folder in folders {
        found.extend(sources(src, &folder));
    }
    found
}

/// A file without comments, what is in quotes, and tests.
fn code(text: &str) -> String {
    let text = text.split("\n#[cfg(test)]\nmod ").next().unwrap_or(text);
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let skipped = match c {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |at| at + 2),
            '"' => quoted(rest),
            'r' if !out.ends_with(|c: char| c.is_alphanumeric() || c == '_') => raw(rest),
            '\'' if rest.starts_with("'\\") => rest[2..].find('\'').map_or(rest.len(), |at| at + 3),
            // A letter in quotes, and not a lifetime.
            '\'' if rest.chars().nth(2) == Some('\'') => {
                rest.char_indices().nth(3).map_or(rest.len(), |(at, _)| at)
            }
            _ => 0,
        };
        if skipped == 0 {
            out.push(c);
        }
        rest = &rest[skipped.max(c.len_utf8())..];
    }
    out
}

/// The length of a string in quotes.
fn quoted(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The length of a raw string, 0 for what is none.
fn raw(text: &str) -> usize {
    let hashes = text[1..].chars().take_while(|c| *c == '#').count();
    if !text[1 + hashes..].starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    let start = hashes + 2;
    text[start..].find(&end).map_or(text.len(), |at| start + at + end.len())
}

/// A path in code: its segments, and whether it is handed on to others (`pub use`).
struct Import {
    path: Vec<String>,
    is_public: bool,
}

/// What a file imports, and what it names from the crate's root or from where it is.
fn imports(code: &str) -> Vec<Import> {
    let mut found = Vec::new();
    let mut body = String::new();
    let mut rest = code;
    while let Some(at) = rest.find("use ") {
        let before = &rest[..at];
        body.push_str(before);
        rest = &rest[at + 4..];
        if before.ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let Some(end) = rest.find(';') else { break };
        let item = before.rsplit([';', '}', '\n']).next().unwrap_or_default();
        let is_public = item.trim_start().starts_with("pub");
        let tree: String = rest[..end].split_whitespace().collect::<Vec<_>>().join(" ");
        found.extend(expand(&tree, &[]).into_iter().map(|path| Import { path, is_public }));
        rest = &rest[end..];
    }
    body.push_str(rest);
    let aliases: BTreeMap<String, Vec<String>> =
        found.iter().filter_map(|i| Some((i.path.last()?.clone(), i.path.clone()))).collect();
    for path in paths(&body) {
        let path = match aliases.get(&path[0]) {
            Some(whole) => whole.iter().chain(&path[1..]).cloned().collect(),
            None => path,
        };
        found.push(Import { path, is_public: false });
    }
    found
}

/// `a::b` and `a::c::d` of `a::{b, c::{d as e}}`.
fn expand(tree: &str, before: &[String]) -> Vec<Vec<String>> {
    let (head, inner) = match tree.find('{') {
        Some(at) => (&tree[..at], Some(&tree[at + 1..tree.rfind('}').unwrap_or(tree.len())])),
        None => (tree.split(" as ").next().unwrap_or(tree), None),
    };
    let segments = head.split("::").map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned);
    let path: Vec<String> = before.iter().cloned().chain(segments).collect();
    let Some(inner) = inner else { return vec![path] };
    let (mut depth, mut start, mut out) = (0, 0, Vec::new());
    for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let part = inner[start..at].trim();
                out.extend((!part.is_empty()).then(|| expand(part, &path)).into_iter().flatten());
                start = at + 1;
            }
            _ => {}
        }
    }
    out
}

/// Every `a::b::c` of some code.
fn paths(code: &str) -> Vec<Vec<String>> {
    let words = code.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
    let words = words.filter(|w| w.contains("::") && !w.starts_with(':'));
    words.map(|w| w.split("::").filter(|s| !s.is_empty()).map(str::to_owned).collect()).collect()
}

/// The modules that stand on each other in circles.
fn circles(files: &BTreeMap<Module, String>) -> Vec<Vec<Module>> {
    let all: BTreeMap<&Module, Vec<Import>> = files.iter().map(|(m, code)| (m, imports(code))).collect();
    let mut below: BTreeMap<&Module, BTreeSet<&Module>> = BTreeMap::new();
    for (module, imports) in &all {
        let found = imports.iter().filter_map(|i| defining(&all, module, &i.path, 8));
        let outside = found.filter(|found| !module.starts_with(found));
        let parts = files.keys().filter(|m| m.len() == module.len() + 1 && m.starts_with(module));
        below.insert(module, outside.chain(parts).collect());
    }
    let reach: BTreeMap<_, _> = below.keys().map(|m| (*m, reached(&below, m))).collect();
    let mut found: Vec<Vec<Module>> = Vec::new();
    for (module, reached) in &reach {
        let circle = reached.iter().filter(|other| reach[**other].contains(*module));
        let circle: Vec<Module> = circle.map(|m| (*m).clone()).collect();
        if !circle.is_empty() && !found.contains(&circle) {
            found.push(circle);
        }
    }
    found
}

/// All modules that one stands on, by way of others too.
fn reached<'a>(below: &BTreeMap<&'a Module, BTreeSet<&'a Module>>, from: &Module) -> BTreeSet<&'a Module> {
    let mut found = BTreeSet::new();
    let mut todo: Vec<&Module> = below[from].iter().copied().collect();
    while let Some(module) = todo.pop() {
        if found.insert(module) {
            todo.extend(below[module].iter().copied());
        }
    }
    found
}

/// The module that defines what a path in `module` names; nothing for other crates.
fn defining<'a>(
    all: &BTreeMap<&'a Module, Vec<Import>>,
    module: &Module,
    path: &[String],
    hops: usize,
) -> Option<&'a Module> {
    let (mut at, mut rest) = start(all, module, path)?;
    while let Some((next, behind)) = rest.split_first() {
        let inner: Module = at.iter().chain([next]).cloned().collect();
        if !all.contains_key(&inner) {
            break;
        }
        (at, rest) = (inner, behind);
    }
    let handed_on = rest.first().filter(|_| hops > 0).and_then(|name| {
        let import = all[&at].iter().find(|i| i.is_public && i.path.last() == Some(name))?;
        let whole: Vec<String> = import.path.iter().chain(&rest[1..]).cloned().collect();
        defining(all, &at, &whole, hops - 1)
    });
    handed_on.or_else(|| all.get_key_value(&at).map(|(m, _)| *m))
}

/// Where a path begins, and what is left of it.
fn start<'p>(
    all: &BTreeMap<&Module, Vec<Import>>,
    module: &Module,
    path: &'p [String],
) -> Option<(Module, &'p [String])> {
    let ups = path.iter().take_while(|s| *s == "super").count();
    let inner: Module = module.iter().chain(path.first()).cloned().collect();
    match path.first()?.as_str() {
        "crate" => Some((Module::new(), &path[1..])),
        "super" => Some((module[..module.len().checked_sub(ups)?].to_vec(), &path[ups..])),
        "self" => Some((module.clone(), &path[1..])),
        _ => all.contains_key(&inner).then(|| (module.clone(), path)),
    }
}

#[test]
fn circles_are_found_in_each_form() {
    let check = |files: &[(&str, &str)], expected: &[&str]| {
        let module = |path: &str| path.split('/').filter(|p| !p.is_empty()).map(str::to_owned).collect();
        let files = files.iter().map(|(path, text)| (module(path), code(text))).collect();
        let found: Vec<String> = circles(&files).iter().map(|c| show(c)).collect();
        assert_eq!(found, expected, "{files:?}");
    };
    let root = ("", "mod a; mod b; pub use b::B;");
    check(&[root, ("a", "use crate::b::B;"), ("b", "use std::fmt;")], &[]);
    check(&[root, ("a", "use crate::b::B;"), ("b", "fn f() -> super::a::A {}")], &["a, b"]);
    // By a name that the root hands on, and by a module that is named where it is used.
    check(&[root, ("a", "use crate::{B, x};"), ("b", "use super::a;\nfn f() { a::g() }")], &["a, b"]);
    check(
        &[root, ("a", "use crate::{b::{B, C}};"), ("b", "// crate::a\nconst A: &str = \"crate::a\";")],
        &[],
    );
    check(&[root, ("a", "use crate::b;"), ("b", "\n#[cfg(test)]\nmod tests { use crate::a; }")], &[]);
    // A part may take what its module has; of two parts none may take what the other one has of it.
    let parts = ("a/c", "use super::A;");
    check(&[root, ("a", "mod c; use self::c::C;"), parts, ("b", "")], &[]);
    check(&[root, ("a", "mod c;"), ("a/c", "use super::d;"), ("a/d", "use super::c::C;")], &["a/c, a/d"]);
    check(&[root, ("a", "mod c;"), ("a/c", "use crate::b::B;"), ("b", "use crate::a::A;")], &["a, a/c, b"]);
}
