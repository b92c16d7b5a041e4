//! The modules of a crate stand on each other in one order: each imports only those before it.
//!
//! `ARCHITECTURE.md` says what the layers are for. A module is a file or folder in `src`; what the files of a folder import
//! of each other is their own affair, and what is only for tests does not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A crate, and its modules from the lowest on.
const CRATES: &[(&str, &[&str])] = &[
    (
        "engine",
        &[
            // What all others speak of.
            "bulk",
            "config",
            "memory",
            "shared",
            "site",
            "split",
            "strided",
            "view",
            "picked",
            "error",
            "collective",
            "target",
            "ending",
            "work",
            "lanes",
            "mark",
            "timing",
            "spread",
            "buffers",
            "inst",
            "origin",
            "value",
            "events",
            "flight",
            "ops",
            "tensor",
            "threads",
            "metrics",
            "underway",
            "profile",
            "trace",
            // Programs.
            "images",
            "graph",
            "effort",
            "cached",
            "program",
            "family",
            "known",
            "sizes",
            "seen",
            "counts",
            "alike",
            "isolate",
            // Watching them.
            "explain",
            "graphs",
            "missed",
            // Running them, and pretending to.
            "executor",
            "groups",
            "launch",
            "carry",
            "agree",
            "roles",
            "undonated",
            "absent",
            // Recording.
            "recipe",
            "numbered",
            "apart",
            "tape",
            "body",
            "window",
            "fence",
            "part",
            "follow",
            "stream",
            "pad",
            "turns",
            "mesh",
            "flush",
            "varying",
            "processes",
            "taping",
            "replay",
            "steps",
            "bounded",
            // What PyTorch calls.
            "call",
            "bodies",
            "arguments",
            "decomposed",
            "masks",
            "engine",
            "dispatch",
            "express",
            "report",
            "lib",
        ],
    ),
    (
        "preflight",
        &[
            "environment",
            "verdict",
            "progress",
            "hardware",
            "split",
            "compile",
            "memory",
            "record",
            "answer",
            "judge",
            "session",
            "search",
            "show",
            "lib",
        ],
    ),
    (
        "audit",
        &[
            "source", "edit", "python", "rule", "rules", "finding", "error", "parallel", "walk", "formats",
            "select", "one", "across", "files", "effort", "report", "fixes", "show", "lib",
        ],
    ),
];

#[test]
fn modules_import_only_what_is_below_them() {
    let mut wrong = Vec::new();
    for (name, order) in CRATES {
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src");
        let found = imports(&src);
        let place = |module: &str| order.iter().position(|m| *m == module);
        for (module, used) in &found {
            let Some(at) = place(module) else {
                wrong.push(format!("{name}: `{module}` is in no layer: put it into this test"));
                continue;
            };
            let above = used.iter().filter(|u| found.contains_key(*u) && place(u).is_none_or(|p| p > at));
            wrong.extend(above.map(|u| format!("{name}: `{module}` imports `{u}`, which is above it")));
        }
        let gone = order.iter().filter(|m| !found.contains_key(**m));
        wrong.extend(gone.map(|m| format!("{name}: there is no module `{m}`")));
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The modules of a crate, and the names that each takes from the crate's root.
fn imports(src: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in files(src) {
        let path = file.strip_prefix(src).unwrap();
        let module = path.components().next().unwrap().as_os_str().to_string_lossy();
        let is_root = path.components().count() == 1;
        let text = fs::read_to_string(&file).unwrap();
        let names = found.entry(module.trim_end_matches(".rs").to_owned()).or_default();
        names.extend(from_root(&text, is_root));
    }
    found
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|p| p.is_dir());
    let files = files.into_iter().filter(|f| f.extension().is_some_and(|e| e == "rs"));
    files.chain(folders.iter().flat_map(|f| self::files(f))).collect()
}

/// The names behind `crate::`, and in files of the root behind `super::`.
fn from_root(text: &str, is_root: bool) -> BTreeSet<String> {
    let text = text.split("#[cfg(test)]").next().unwrap_or(text);
    let lines = text.lines().filter(|l| !l.trim_start().starts_with("//"));
    let code = lines.collect::<Vec<_>>().join("\n");
    let mut names = BTreeSet::new();
    for root in if is_root { &["crate::", "super::"][..] } else { &["crate::"] } {
        for (at, _) in code.match_indices(root) {
            let before = code[..at].chars().next_back();
            if before.is_none_or(|c| !(c.is_alphanumeric() || c == '_' || c == ':')) {
                names.extend(first_names(&code[at + root.len()..]));
            }
        }
    }
    names
}

/// `a` of `a::b`, and `a`, `c` of `{a::b, c::{d, e}}`.
fn first_names(path: &str) -> Vec<String> {
    let name =
        |s: &str| s.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let Some(inner) = path.strip_prefix('{') else { return vec![name(path)] };
    let (mut parts, mut depth, mut start) = (Vec::new(), 0usize, 0);
    for (i, c) in inner.char_indices() {
        match c {
            '{' => depth += 1,
            '}' | ',' if depth == 0 => {
                parts.push(name(&inner[start..i]));
                start = i + 1;
                if c == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    parts
}

#[test]
fn imports_are_found_in_each_form() {
    let code = "use crate::a::B;\nuse crate::{c, d::{e, f}, g};\n// crate::comment\nfn x() { crate::h::i() }\n\
                use super::j;\nuse other_crate::k;\n#[cfg(test)]\nuse crate::test_only;";
    let expected = ["a", "c", "d", "g", "h", "j"].map(String::from);
    assert_eq!(from_root(code, true), BTreeSet::from(expected));
    assert!(!from_root(code, false).contains("j"));
}
