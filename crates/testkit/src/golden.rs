//! Golden files: inputs and the expected outputs in one file, compared by a test, rewritten with `OXITORCH_BLESS=1`.
//!
//! A file is a sequence of cases. A line that starts with `case: ` holds the input, the lines up to the next case the
//! expected output; what stands before the first case is a comment. Each file is one test.

use libtest_mimic::{Arguments, Failed, Trial};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

const MARK: &str = "case: ";

/// The environment variable that rewrites the files instead of comparing them.
pub const BLESS: &str = "OXITORCH_BLESS";

/// Runs all `*.txt` below `dir` as tests, together with `others`. To be returned from a `harness = false` main.
pub fn run(
    dir: &Path,
    render: impl Fn(&str) -> String + Send + Sync + 'static,
    others: Vec<Trial>,
) -> ExitCode {
    let arguments = Arguments::from_args();
    let bless = std::env::var_os(BLESS).is_some_and(|v| v == "1");
    let render = Arc::new(render);
    let mut trials = others;
    for path in files(dir) {
        let name = path.strip_prefix(dir).unwrap_or(&path).display().to_string();
        let render = Arc::clone(&render);
        trials.push(Trial::test(name, move || check(&path, &*render, bless)));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The inputs of every case below `dir`, with the file each is in.
pub fn inputs(dir: &Path) -> Vec<(PathBuf, String)> {
    let cases_of = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap_or_default();
        let inputs: Vec<_> = text.lines().filter_map(|l| l.strip_prefix(MARK)).map(str::to_string).collect();
        inputs.into_iter().map(move |input| (path.clone(), input))
    };
    files(dir).into_iter().flat_map(cases_of).collect()
}

/// All text files below a folder, sorted.
fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|e| e == "txt") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn check(path: &Path, render: &dyn Fn(&str) -> String, bless: bool) -> Result<(), Failed> {
    let old = fs::read_to_string(path)?;
    let new = rewrite(&old, render);
    if bless && new != old {
        fs::write(path, new)?;
        return Ok(());
    }
    match difference(&old, &new) {
        None => Ok(()),
        Some(text) => Err(format!("{}: {text}\nrun with {BLESS}=1 to accept", path.display()).into()),
    }
}

/// The file with every output rendered anew.
fn rewrite(old: &str, render: &dyn Fn(&str) -> String) -> String {
    let comment: String =
        old.lines().take_while(|l| !l.starts_with(MARK)).map(|l| format!("{l}\n")).collect();
    let mut new = comment;
    for (i, input) in old.lines().filter_map(|l| l.strip_prefix(MARK)).enumerate() {
        if i > 0 {
            new.push('\n');
        }
        new.push_str(&format!("{MARK}{input}\n{}\n", render(input).trim_end()));
    }
    new
}

/// The first line at which two texts part, with the case it belongs to.
fn difference(old: &str, new: &str) -> Option<String> {
    if old == new {
        return None;
    }
    let mut case = "";
    let (mut a, mut b) = (old.lines(), new.lines());
    for number in 1.. {
        let (want, got) = (a.next(), b.next());
        case = got.filter(|l| l.starts_with(MARK)).unwrap_or(case);
        if want != got || got.is_none() {
            let shown = |l: Option<&str>| l.map_or("the end".to_string(), |l| format!("`{l}`"));
            return Some(format!(
                "line {number}, {case}\n  expected {}\n  got      {}",
                shown(want),
                shown(got)
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_replaced_and_comments_stay() {
        let old = "# about\ncase: a\nold\ncase: b\n";
        let new = rewrite(old, &|input| format!("<{input}>\n"));
        assert_eq!(new, "# about\ncase: a\n<a>\n\ncase: b\n<b>\n");
        assert_eq!(rewrite(&new, &|input| format!("<{input}>\n")), new);
        assert!(difference(old, &new).is_some_and(|d| d.contains("line 3") && d.contains("`old`")));
        assert_eq!(difference(&new, &new), None);
    }
}
