//! `oxitorch diff`: hands what is asked for to `python -m oxitorch.diff`, which runs and compares.

use std::path::PathBuf;

use clap::{Args, Parser};

use crate::facts::Facts;
use crate::script;

/// The command with its script.
#[derive(Args)]
pub(crate) struct Diff {
    #[command(flatten)]
    asked: Asked,
    /// A Python script with its arguments, or -m and a module; options from the first --a or --b on are this command's
    ///
    /// {device} in an argument is the device of the run, {X|Y} is X in run a and Y in run b. Two recorded files need no script.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "SCRIPT")]
    script: Vec<String>,
}

#[derive(Args)]
struct Asked {
    /// A platform (cpu, tpu, cuda, tpu:strict, tpu:debug, tpu:bfloat16, tpu:highest, cpu:float64), or a recorded file [default: cpu]
    #[arg(long, value_name = "PLATFORM")]
    a: Option<String>,
    /// The same for the other run, which takes the random numbers of the first [default: tpu]
    #[arg(long, value_name = "PLATFORM")]
    b: Option<String>,
    /// How many steps of an optimizer are run [default: 3]
    #[arg(long, value_name = "N")]
    steps: Option<u32>,
    /// The step to record op by op [default: the first, and then that where losses part or something is not finite]
    #[arg(long, value_name = "N")]
    step: Option<u32>,
    /// The relative difference from which on losses part [default: 0.001]
    #[arg(long, value_name = "X")]
    loss: Option<f64>,
    /// What generators of random numbers are seeded with before the script [default: 0]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Keep the recorded runs in this folder, as a.trace and b.trace
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Record the run of --a into this file, and compare nothing
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Write what was found as JSON into this file; - is stdout
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report as one page of HTML into this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Options behind the script.
#[derive(Parser)]
#[command(name = "oxitorch diff SCRIPT", no_binary_name = true)]
struct Behind {
    #[command(flatten)]
    asked: Asked,
}

impl Asked {
    /// What the module takes.
    fn flags(&self) -> Vec<String> {
        let path = |p: &Option<PathBuf>| p.as_ref().map(|p| p.display().to_string());
        let number = |n: Option<u32>| n.map(|n| n.to_string());
        [
            ("a", self.a.clone()),
            ("b", self.b.clone()),
            ("steps", number(self.steps)),
            ("step", number(self.step)),
            ("loss", self.loss.map(|x| x.to_string())),
            ("seed", self.seed.map(|x| x.to_string())),
            ("keep", path(&self.keep)),
            ("record", path(&self.record)),
            ("json", path(&self.json)),
            ("html", path(&self.html)),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some(format!("--{name}={}", value?)))
        .collect()
    }
}

impl Diff {
    /// What the module is given: options, of which the last of a name counts, and the script.
    fn arguments(self) -> Result<Vec<String>, clap::Error> {
        let (mut flags, mut script) = (self.asked.flags(), self.script);
        let is_side = |x: &String| ["--a", "--b"].iter().any(|s| x == s || x.starts_with(&format!("{s}=")));
        let given = self.asked.a.is_some() || self.asked.b.is_some();
        if let Some(at) = script.iter().position(is_side).filter(|_| !given) {
            flags.extend(Behind::try_parse_from(script.split_off(at))?.asked.flags());
        }
        flags.push("--".into());
        flags.extend(script);
        Ok(flags)
    }
}

/// Runs the command; its exit status: 0 all that differs is explained, 1 it is not, 2 nothing could be compared.
pub(crate) fn run(diff: Diff, facts: &Facts) -> anyhow::Result<i32> {
    let arguments = match diff.arguments() {
        Ok(arguments) => arguments,
        Err(e) => {
            let _ = e.print();
            if e.kind() == clap::error::ErrorKind::UnknownArgument {
                eprintln!("\nhint: the script's own arguments stand in front of --a and --b");
            }
            return Ok(e.exit_code());
        }
    };
    let module = ["-m", "oxitorch.diff"].map(String::from);
    script::run(&[&module[..], &arguments].concat(), &[], facts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(args: &[&str]) -> String {
        #[derive(Parser)]
        struct Whole {
            #[command(flatten)]
            diff: Diff,
        }
        let whole = Whole::try_parse_from(std::iter::once(&"oxitorch").chain(args)).unwrap();
        whole.diff.arguments().unwrap().join(" ")
    }

    #[test]
    fn options_stand_before_the_script_or_behind_it() {
        assert_eq!(
            arguments(&["--steps", "2", "--b", "tpu", "t.py", "--b", "3"]),
            "--b=tpu --steps=2 -- t.py --b 3"
        );
        assert_eq!(
            arguments(&["t.py", "--lr", "1", "--a", "cpu", "--html=x.html"]),
            "--a=cpu --html=x.html -- t.py --lr 1"
        );
        assert_eq!(arguments(&["--a", "x.trace", "--b", "y.trace"]), "--a=x.trace --b=y.trace --");
    }
}
