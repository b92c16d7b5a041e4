//! `oxitorch preflight`: options before the script or behind it, and where the report goes.

use std::fs;
use std::path::{Path, PathBuf};

use anstyle::AnsiColor;
use anyhow::Context;
use clap::{Args, Parser};
use oxitorch_preflight::{Environment, Options};

use crate::facts::Facts;
use crate::machine;

/// The command with its script.
#[derive(Args)]
pub(crate) struct Preflight {
    #[command(flatten)]
    asked: Asked,
    /// A Python script with its arguments, or -m and a module; options from the first --slice on are this command's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "SCRIPT")]
    script: Vec<String>,
}

#[derive(Args, Clone, Debug, Default)]
struct Asked {
    #[command(flatten)]
    options: Options,
    /// Write the report as JSON into this file; - is stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as one page of HTML into this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Options behind the script.
#[derive(Parser)]
#[command(name = "oxitorch preflight SCRIPT", no_binary_name = true)]
struct Behind {
    #[command(flatten)]
    asked: Asked,
}

impl Preflight {
    /// What is asked for, and the script without the options that stand behind it.
    fn split(self) -> Result<(Asked, Vec<String>), clap::Error> {
        let (mut asked, mut script) = (self.asked, self.script);
        let is_slice = |a: &String| a == "--slice" || a.starts_with("--slice=");
        let Some(at) = script.iter().position(is_slice).filter(|_| asked.options.slices.is_empty()) else {
            return Ok((asked, script));
        };
        let behind = Behind::try_parse_from(script.split_off(at))?.asked;
        asked.json = behind.json.or(asked.json);
        asked.html = behind.html.or(asked.html);
        asked.options = behind.options.or(asked.options);
        Ok((asked, script))
    }
}

/// Runs the command; what it prints and the exit status. What is wrong with the arguments has status 2, as has all that
/// keeps it from a verdict.
pub(crate) fn run(preflight: Preflight, facts: &Facts) -> anyhow::Result<(String, i32)> {
    let (asked, script) = match preflight.split() {
        Ok(parts) => parts,
        Err(e) => {
            let _ = e.print();
            return Ok((String::new(), e.exit_code()));
        }
    };
    let report = match oxitorch_preflight::run(&asked.options, script, &environment(facts)) {
        Ok(report) => report,
        Err(e) => {
            let red = AnsiColor::Red.on_default().bold();
            anstream::eprintln!("{red}error{red:#}: {e:#}");
            return Ok((String::new(), oxitorch_preflight::UNKNOWN));
        }
    };
    let status = report.status();
    if let Some(file) = &asked.html {
        fs::write(file, report.html()?).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let json = serde_json::to_string_pretty(&report)? + "\n";
    match &asked.json {
        Some(file) if file == Path::new("-") => return Ok((json, status)),
        Some(file) => fs::write(file, json).with_context(|| format!("cannot write {}", file.display()))?,
        None => {}
    }
    Ok((report.text(), status))
}

/// What preflight wants to know of this machine and its Python.
pub(crate) fn environment(facts: &Facts) -> Environment {
    Environment {
        executable: facts.executable.clone(),
        site_dirs: facts.site_dirs.clone(),
        memory: machine::memory().map(|m| m.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(args: &[&str]) -> (Options, Vec<String>) {
        #[derive(Parser)]
        struct Whole {
            #[command(flatten)]
            preflight: Preflight,
        }
        let whole = Whole::try_parse_from(std::iter::once(&"oxitorch").chain(args)).unwrap();
        let (asked, script) = whole.preflight.split().unwrap();
        (asked.options, script)
    }

    #[test]
    fn options_stand_before_the_script_or_behind_it() {
        let script = ["train.py", "--steps", "600"];
        let (options, rest) = split(&["--slice", "v5e-1", "--steps", "2", "train.py", "--steps", "600"]);
        assert_eq!(
            (options.slices, options.steps, rest),
            (vec!["v5e-1".to_owned()], Some(2), script.map(String::from).to_vec())
        );
        let (options, rest) =
            split(&["train.py", "--steps", "600", "--slice", "v5e-1", "--slice=v6e-1", "--steps", "4"]);
        assert_eq!(options.slices, ["v5e-1", "v6e-1"]);
        assert_eq!((options.steps, rest), (Some(4), script.map(String::from).to_vec()));
        // A script may have an option of that name.
        let (options, rest) = split(&["--slice", "cpu", "train.py", "--slice", "3"]);
        assert_eq!(
            (options.slices, rest),
            (vec!["cpu".to_owned()], ["train.py", "--slice", "3"].map(String::from).to_vec())
        );
    }
}
