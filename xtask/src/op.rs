//! Everything that is about one op, and nothing else: its row, its golden, its calls and samples on the device.

use crate::{python, root, say, succeed};
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

const USAGE: &str = "usage: cargo xtask op NAME [UNIT...] [--bless]

NAME is an overload (add.Tensor), or a name that stands for all of its overloads (add).
UNIT is a pattern of the conformance suite, 'op/nn.functional.pad:*/float32/*', where no entry has the name of the op.
--bless writes what the cases of its golden lower to, instead of comparing it.";

const FAMILIES: &str = "crates/aten/src/families";
const GOLDENS: &str = "crates/aten/goldens";
/// What the installed build is made of, as far as an op goes.
const SOURCES: &[&str] = &["crates/aten/src", "crates/hlo/src", "crates/engine/src", "crates/torch"];
/// The profile of `make test`, so that nothing is built twice.
const PROFILE: &str = "ci";

pub(crate) fn run(args: &[String]) -> Result<()> {
    let (options, words): (Vec<&str>, Vec<&str>) =
        args.iter().map(String::as_str).partition(|a| a.starts_with('-'));
    let Some((&name, units)) = words.split_first() else { bail!("{USAGE}") };
    ensure!(options.iter().all(|o| *o == "--bless"), "{USAGE}");
    let root = root();
    let families = texts(&root, FAMILIES, "rs")?;
    let row = Found::of(&families, |text| rows(text, name));
    let golden = Found::of(&texts(&root, GOLDENS, "txt")?, |text| cases(text, name));
    row.show("row");
    if row.places.is_empty() {
        let base = functional(name);
        if base != name && !Found::of(&families, |text| rows(text, &base)).names.is_empty() {
            bail!("`{name}` is derived from the row of `{base}`\nhint: `cargo xtask op {base}`");
        }
        bail!("{}", no_row(name, &std::fs::read_to_string(root.join("crates/aten/schemas.txt"))?));
    }
    golden.show("golden");
    if let Some(bare) = row.names.iter().find(|r| !golden.names.contains(r)) {
        bail!(
            "`{bare}` has no golden\nhint: write `case: {bare} f32[2,3]`, with an argument for each parameter, into \
             {GOLDENS}/FAMILY/{}.txt, and run `cargo xtask op {name} --bless`",
            bare.split('.').next().unwrap_or(bare)
        );
    }
    in_rust(&root, &golden.files(), !options.is_empty())?;
    installed(&root)?;
    on_device(&root, name, units)
}

/// The row against PyTorch's schema, and the golden against what it lowers to.
fn in_rust(root: &Path, goldens: &[PathBuf], bless: bool) -> Result<()> {
    let test = |test: &str, args: &[&str]| {
        let mut command = Command::new("cargo");
        command.args([
            "test",
            "-q",
            "--locked",
            "--profile",
            PROFILE,
            "-p",
            "oxitorch-aten",
            "--test",
            test,
            "--",
        ]);
        command.args(args);
        command
    };
    step(
        "the row is PyTorch's schema",
        root,
        &mut test("schemas", &[]),
        "the row's parameters, or its name, differ",
    )?;
    let names: Vec<_> =
        goldens.iter().map(|f| f.strip_prefix(GOLDENS).unwrap_or(f).display().to_string()).collect();
    let mut command = test("goldens", &["--exact"]);
    command.args(&names).env("OXITORCH_BLESS", if bless { "1" } else { "" });
    step(
        "the golden is what the row lowers to",
        root,
        &mut command,
        "`--bless` accepts what it lowers to now",
    )
}

/// The same calls and PyTorch's own samples on the device, against the CPU.
fn on_device(root: &Path, name: &str, units: &[&str]) -> Result<()> {
    let goldens = &mut python(
        root,
        &["-m", "pytest", "-q", "tests/device/test_goldens.py::test_goldens", "--op", name],
    );
    step(
        "the calls of the golden on the device",
        root,
        goldens,
        "the lowering computes something else than PyTorch",
    )?;
    let units =
        &mut python(root, &[&["-m", "tests.conformance", "--jobs", "2", "--op", name], units].concat());
    step(
        "PyTorch's samples of the op",
        root,
        units,
        "what may fail is in tests/conformance/exceptions.toml, with a reason",
    )
}

/// Whether the installed build has what the sources say.
fn installed(root: &Path) -> Result<()> {
    const HINT: &str = "hint: `make install PROFILE=ci` builds and installs it in .venv";
    let core = |site: PathBuf| site.join("site-packages/oxitorch/_core.abi3.so");
    let built = files(&root.join(".venv/lib"), 0)?.into_iter().map(core).find(|f| f.is_file());
    let built = built.with_context(|| format!("oxitorch is not installed in .venv\n{HINT}"))?;
    let built = changed(&built)?;
    for folder in SOURCES {
        for file in files(&root.join(folder), usize::MAX)? {
            let source = file.extension().is_some_and(|e| e == "rs" || e == "cpp" || e == "h");
            let name = file.strip_prefix(root).unwrap_or(&file).display();
            ensure!(!source || changed(&file)? <= built, "the build in .venv is older than {name}\n{HINT}");
        }
    }
    Ok(())
}

fn changed(file: &Path) -> Result<SystemTime> {
    Ok(std::fs::metadata(file)?.modified()?)
}

/// Runs a part of the command and says how long it took.
fn step(what: &str, root: &Path, command: &mut Command, hint: &str) -> Result<()> {
    say(&format!("\n== {what}"));
    let start = Instant::now();
    succeed(command.current_dir(root)).map_err(|e| anyhow!("\nfailed: {what}: {e}\nhint: {hint}"))?;
    say(&format!("{:.1} s", Duration::as_secs_f64(&start.elapsed())));
    Ok(())
}

/// Rows or cases, and where they are.
#[derive(Default)]
struct Found {
    names: Vec<String>,
    places: Vec<(PathBuf, usize)>,
}

impl Found {
    /// What `find` finds in the text of each file.
    fn of(texts: &[(PathBuf, String)], find: impl Fn(&str) -> Vec<(usize, String)>) -> Found {
        let mut all = Found::default();
        for (file, text) in texts {
            for (line, name) in find(text) {
                all.places.push((file.clone(), line));
                all.names.push(name);
            }
        }
        all
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<_> = self.places.iter().map(|(file, _)| file.clone()).collect();
        files.dedup();
        files
    }

    fn show(&self, what: &str) {
        for ((file, line), name) in self.places.iter().zip(&self.names) {
            say(&format!("{what:8}{name:30}{}:{line}", file.display()));
        }
    }
}

/// Whether a row is the op that was asked for, or an overload of it.
fn is_of(row: &str, name: &str) -> bool {
    row == name || row.split_once('.').is_some_and(|(base, _)| base == name)
}

/// The rows of an op in the text of a family, with their lines.
fn rows(text: &str, name: &str) -> Vec<(usize, String)> {
    let table = text.lines().enumerate().skip_while(|(_, l)| !l.starts_with("pub static ROWS"));
    let mut found = Vec::new();
    for (i, line) in table {
        let mut before = String::new();
        for (n, part) in line.split('"').enumerate() {
            if n % 2 == 0 {
                before = part.trim_end().to_owned();
            } else if names_a_row(&before) && is_of(part, name) {
                found.push((i + 1, part.to_owned()));
            }
        }
        if line.trim_end().ends_with("];") {
            break;
        }
    }
    found
}

/// Whether a name behind this is that of a row, as in `op!("add", ...)`, and not an argument of a method of a row.
fn names_a_row(before: &str) -> bool {
    let called = before.strip_suffix('(').map(|b| b.rsplit([' ', ',', '[', '(']).next().unwrap_or(b));
    called.map_or(before.is_empty() || before.ends_with(','), |function| !function.contains('.'))
}

/// The cases of an op in a golden file, with their lines.
fn cases(text: &str, name: &str) -> Vec<(usize, String)> {
    let case = |line: &str| line.strip_prefix("case: ")?.split(' ').next().map(str::to_owned);
    let all = text.lines().enumerate().filter_map(|(i, line)| Some((i + 1, case(line)?)));
    let mut found: Vec<_> = all.filter(|(_, n)| is_of(n, name)).collect();
    found.dedup_by(|(_, a), (_, b)| a == b);
    found
}

/// The name of an op that writes nothing: `add.Tensor` of `add_.Tensor`.
fn functional(name: &str) -> String {
    let (base, overload) = name.split_once('.').map_or((name, None), |(b, o)| (b, Some(o)));
    let base = base.strip_prefix("_foreach_").unwrap_or(base);
    [Some(base.strip_suffix('_').unwrap_or(base)), overload]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(".")
}

/// What there is instead of a row.
fn no_row(name: &str, schemas: &str) -> String {
    let functional = functional(name);
    let overloads = schemas.lines().filter_map(|l| l.split_once("| ")).map(|(_, schema)| schema);
    let same: Vec<_> =
        overloads.filter(|s| s.split('(').next().is_some_and(|s| is_of(s, &functional))).collect();
    if same.is_empty() {
        return format!("PyTorch has no overload `{name}`, and there is no row of this name");
    }
    format!(
        "`{name}` has no row; PyTorch has\n  {}\nhint: a row goes into ROWS of a file in {FAMILIES}, for the overload that \
         writes nothing: in-place, `out=` and `_foreach_` forms are derived from it",
        same.join("\n  ")
    )
}

/// The files of a folder with this ending, with their text; named from the root on.
fn texts(root: &Path, folder: &str, ending: &str) -> Result<Vec<(PathBuf, String)>> {
    let all = files(&root.join(folder), usize::MAX)?;
    let wanted = all.into_iter().filter(|f| f.extension().is_some_and(|e| e == ending));
    wanted.map(|f| Ok((f.strip_prefix(root)?.to_path_buf(), std::fs::read_to_string(&f)?))).collect()
}

/// What lies in a folder, and in folders below it up to a depth; sorted.
fn files(folder: &Path, depth: usize) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let path = entry?.path();
        if depth > 0 && path.is_dir() {
            found.extend(files(&path, depth - 1)?);
        } else {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_golden_has_a_row_here() {
        let families = texts(&root(), FAMILIES, "rs").expect("read");
        let all: Vec<_> = families.iter().flat_map(|(_, text)| rows_of_all(text)).collect();
        let goldens = texts(&root(), GOLDENS, "txt").expect("read");
        for (file, text) in &goldens {
            for name in text.lines().filter_map(|l| l.strip_prefix("case: ")?.split(' ').next()) {
                assert!(all.iter().any(|r| r == name), "{name} in {}", file.display());
            }
        }
    }

    fn rows_of_all(text: &str) -> Vec<String> {
        let quoted = text.split('"').skip(1).step_by(2).filter(|n| !n.contains(char::is_whitespace));
        quoted.flat_map(|n| rows(text, n)).map(|(_, row)| row).collect()
    }

    #[test]
    fn rows_and_cases_of_an_op() {
        let family = "// \"add.Tensor\", \npub static ROWS: &[Row] = &[\n    op!(\"add.Tensor\", add).sized(\"add.count\"),\n    \
                      pointwise!(\n        \"add.Scalar\", x\n    ),\n    unary(\"addr\", Same, f),\n];\nfn f() { g(\"add.Tensor\", 1) }\n";
        assert_eq!(rows(family, "add.Tensor"), [(3, "add.Tensor".to_owned())]);
        assert_eq!(rows(family, "add"), [(3, "add.Tensor".to_owned()), (5, "add.Scalar".to_owned())]);
        assert_eq!(rows(family, "addr"), [(7, "addr".to_owned())]);
        let golden = "# add\ncase: add.Tensor f32[2] f32[2] 1\nmodule\ncase: add.Tensor f32[2] f32[1] 1\ncase: addr f32[2]\n";
        assert_eq!(cases(golden, "add"), [(2, "add.Tensor".to_owned())]);
    }

    #[test]
    fn what_to_do_without_a_row() {
        let schemas = "# x\nexplicit | foo_.Tensor(Tensor(a!) self) -> Tensor(a!)\n | foo.Tensor(Tensor self) -> Tensor\n";
        for name in ["foo.Tensor", "foo_.Tensor", "foo", "foo_"] {
            let text = no_row(name, schemas);
            assert!(
                text.contains("\n  foo.Tensor(Tensor self) -> Tensor\n") && text.contains("hint:"),
                "{text}"
            );
        }
        assert_eq!(no_row("bar", schemas), "PyTorch has no overload `bar`, and there is no row of this name");
    }
}
