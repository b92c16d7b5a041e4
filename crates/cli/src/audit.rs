//! `oxitorch audit`: which files, which rules, and where the findings go.

use std::fs;
use std::path::{Path, PathBuf};

use anstyle::AnsiColor;
use anyhow::Context;
use clap::{Args, ValueEnum};
use oxitorch_audit::{Report, Settings, Severity};

/// Bad arguments, or a path that is not there.
const UNKNOWN: i32 = 2;

/// The command.
#[derive(Args)]
pub(crate) struct Audit {
    /// Files and folders: Python, notebooks, shell scripts, YAML, JSON, Dockerfiles, requirements, C++ and CUDA
    #[arg(value_name = "PATH", required_unless_present_any = ["explain", "rules"])]
    paths: Vec<PathBuf>,
    /// Rules or families to look for, such as DEV or SYN001 [default: all]
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    select: Vec<String>,
    /// Rules or families to leave out
    #[arg(long, value_name = "RULE", value_delimiter = ',')]
    ignore: Vec<String>,
    /// Paths, folders or names to leave out; * stands for any text
    #[arg(long, value_name = "PATTERN", value_delimiter = ',')]
    exclude: Vec<String>,
    /// Make the edits that are safe, then say what is left
    #[arg(long)]
    fix: bool,
    /// Print these edits as a diff and make none
    #[arg(long)]
    diff: bool,
    /// Print the sum alone
    #[arg(long)]
    summary: bool,
    /// Write JSON into this file [default: stdout]
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Write SARIF 2.1.0 into this file [default: stdout]
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    sarif: Option<PathBuf>,
    /// Write one page of HTML into this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print annotations for GitHub's workflows
    #[arg(long)]
    github: bool,
    /// The least severity with which the exit status is 1
    #[arg(long, value_enum, default_value = "error", value_name = "SEVERITY")]
    fail_on: FailOn,
    /// Say more about a rule
    #[arg(long, value_name = "RULE")]
    explain: Option<String>,
    /// List the rules; with --json as data
    #[arg(long)]
    rules: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum FailOn {
    Error,
    Warning,
    Note,
    Never,
}

impl FailOn {
    fn fails(self, report: &Report) -> bool {
        let least = match self {
            FailOn::Error => Severity::Error,
            FailOn::Warning => Severity::Warning,
            FailOn::Note => Severity::Note,
            FailOn::Never => return false,
        };
        report.findings.iter().any(|f| f.severity >= least)
    }
}

/// Runs the command; what it prints and the exit status: 1 if there are findings of the severity that is asked for, 2 if
/// it could not be done.
pub(crate) fn run(asked: &Audit) -> (String, i32) {
    match tried(asked) {
        Ok(done) => done,
        Err(e) => {
            let red = AnsiColor::Red.on_default().bold();
            anstream::eprintln!("{red}error{red:#}: {e:#}");
            (String::new(), UNKNOWN)
        }
    }
}

fn tried(asked: &Audit) -> anyhow::Result<(String, i32)> {
    if let Some(id) = &asked.explain {
        let rule = oxitorch_audit::by_id(id)
            .with_context(|| format!("there is no rule `{id}`; `oxitorch audit --rules` lists them"))?;
        return Ok((oxitorch_audit::explain(rule), 0));
    }
    if asked.rules {
        return Ok((rules(asked)?, 0));
    }
    let settings = settings(asked)?;
    if asked.diff {
        let changed = oxitorch_audit::fix(&asked.paths, &settings, false)?;
        let text: String = changed.iter().map(|c| c.diff()).collect();
        return Ok((text, i32::from(!changed.is_empty())));
    }
    if asked.fix {
        let changed = oxitorch_audit::fix(&asked.paths, &settings, true)?;
        let edits: usize = changed.iter().map(|c| c.edits).sum();
        anstream::eprintln!("{edits} edits in {} files", changed.len());
    }
    let report = oxitorch_audit::audit(&asked.paths, &settings)?;
    let status = i32::from(asked.fail_on.fails(&report));
    if let Some(file) = &asked.html {
        write(file, report.html()?)?;
    }
    let mut printed = None;
    for (file, value) in [
        (&asked.json, asked.json.as_ref().map(|_| serde_json::to_value(&report)).transpose()?),
        (&asked.sarif, asked.sarif.as_ref().map(|_| oxitorch_audit::sarif(&report))),
    ] {
        let (Some(file), Some(value)) = (file, value) else { continue };
        let text = serde_json::to_string_pretty(&value)? + "\n";
        if file == Path::new("-") { printed = Some(text) } else { write(file, text)? }
    }
    let text = match printed {
        Some(text) => text,
        None if asked.github => oxitorch_audit::github(&report),
        None => oxitorch_audit::text(&report, !asked.summary),
    };
    Ok((text, status))
}

/// Those of the nearest `pyproject.toml`, with what the options say besides.
fn settings(asked: &Audit) -> anyhow::Result<Settings> {
    let first = asked.paths.first().map_or(Path::new("."), PathBuf::as_path);
    let mut settings = Settings::around(first)?;
    if !asked.select.is_empty() {
        settings.select.clone_from(&asked.select);
    }
    settings.ignore.extend(asked.ignore.iter().cloned());
    settings.exclude.extend(asked.exclude.iter().cloned());
    settings.check()?;
    Ok(settings)
}

fn rules(asked: &Audit) -> anyhow::Result<String> {
    if asked.json.is_some() {
        return Ok(serde_json::to_string_pretty(&oxitorch_audit::table())? + "\n");
    }
    let mut out = String::new();
    for family in oxitorch_audit::families() {
        out += &format!("{}: {}\n", family.name, family.about);
        for rule in family.rules {
            let runs = if rule.unchanged() { "runs unchanged" } else { "has to be changed" };
            out += &format!("  {}  {:8} {:34} {runs}\n", rule.id, rule.severity.name(), rule.name);
        }
    }
    Ok(out)
}

fn write(file: &Path, text: String) -> anyhow::Result<()> {
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}
