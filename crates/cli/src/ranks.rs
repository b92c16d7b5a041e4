//! `oxitorch ranks`: what the processes of `torch.distributed` on this machine are about.
//!
//! Each keeps its latest collectives in a file (`engine/flight.rs`), which is there when it hangs or was killed.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anstyle::{AnsiColor, Style};
use clap::Args;
use oxitorch_format::{cut, duration};
use serde::{Deserialize, Serialize};
use std::time::Duration;

use crate::facts::Facts;

#[derive(Args)]
pub(crate) struct Ranks {
    /// How many of the latest collectives of each rank
    #[arg(long, default_value_t = 1, value_name = "N")]
    last: usize,
    /// The folder of their files [default: OXITORCH_RANKS]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// A process.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Rank {
    rank: u64,
    ranks: u64,
    run: String,
    process: u32,
    host: String,
    began_unix_s: f64,
    /// Whether it is still there.
    #[serde(default)]
    runs: bool,
    /// The latest last.
    #[serde(default)]
    collectives: Vec<Collective>,
}

/// A collective in which a process was.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Collective {
    entry: u64,
    group: String,
    number: u64,
    what: String,
    line: String,
    state: String,
    began_unix_s: f64,
    ended_unix_s: Option<f64>,
}

pub(crate) fn run(asked: &Ranks, facts: &Facts) -> anyhow::Result<String> {
    let dir = asked.dir.clone().or_else(|| facts.ranks.clone());
    let Some(dir) = dir else { anyhow::bail!("OXITORCH_RANKS=off: ranks record nothing") };
    let here = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_there =
        |rank: &Rank| rank.host == here.trim() && Path::new(&format!("/proc/{}", rank.process)).exists();
    let ranks = latest(read(&dir, is_there));
    if asked.json {
        return Ok(serde_json::to_string_pretty(&ranks)? + "\n");
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    Ok(match ranks.first() {
        Some(_) => text(&ranks, asked.last.max(1), now),
        None => format!("no ranks in {}: a process records once it has a process group\n", dir.display()),
    })
}

/// The processes whose files are in a folder.
fn read(dir: &Path, is_there: impl Fn(&Rank) -> bool) -> Vec<Rank> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries
        .filter_map(Result::ok)
        .filter_map(|e| parse(&fs::read_to_string(e.path()).ok()?, &is_there))
        .collect()
}

fn parse(text: &str, is_there: impl Fn(&Rank) -> bool) -> Option<Rank> {
    let mut lines = text.lines();
    let mut rank: Rank = serde_json::from_str(lines.next()?).ok()?;
    // A line may just be written.
    rank.collectives = lines.filter_map(|line| serde_json::from_str(line).ok()).collect();
    rank.collectives.sort_by_key(|c: &Collective| c.entry);
    rank.runs = is_there(&rank);
    Some(rank)
}

/// Those of the run that began last.
fn latest(mut all: Vec<Rank>) -> Vec<Rank> {
    let last = all.iter().max_by(|a, b| a.began_unix_s.total_cmp(&b.began_unix_s)).map(|r| r.run.clone());
    all.retain(|r| Some(&r.run) == last.as_ref());
    all.sort_by_key(|r| r.rank);
    all
}

fn text(ranks: &[Rank], last: usize, now: f64) -> String {
    let (dim, red, yellow) =
        (Style::new().dimmed(), AnsiColor::Red.on_default(), AnsiColor::Yellow.on_default());
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{dim}{:>4} {:>8}  {:10} {:>6}  {:40} {:>9}  line{dim:#}",
        "rank", "process", "state", "number", "collective", "since"
    );
    for rank in ranks {
        let shown = rank.collectives.len().saturating_sub(last);
        let name = |i: usize| {
            if i == shown { (rank.rank.to_string(), rank.process.to_string()) } else { Default::default() }
        };
        let lines: Vec<Option<&Collective>> = match rank.collectives.get(shown..) {
            Some(some) if !some.is_empty() => some.iter().map(Some).collect(),
            _ => vec![None],
        };
        for (i, collective) in lines.into_iter().enumerate() {
            let (number, process) = name(shown + i);
            let latest = shown + i + 1 >= rank.collectives.len();
            let state = match collective {
                _ if latest && !rank.runs => "ended",
                Some(c) => c.state.as_str(),
                None => "nothing yet",
            };
            let colour = match state {
                "waits" => yellow,
                "failed" | "ended" => red,
                _ => Style::new(),
            };
            let _ = write!(out, "{number:>4} {process:>8}  {colour}{state:10}{colour:#}");
            let _ = match collective {
                Some(c) => {
                    let since =
                        Duration::from_secs_f64((now - c.ended_unix_s.unwrap_or(c.began_unix_s)).max(0.0));
                    let line = c.line.rsplit('/').next().unwrap_or(&c.line);
                    writeln!(out, " {:>6}  {:40} {:>9}  {line}", c.number, cut(&c.what, 40), duration(since))
                }
                None => writeln!(out),
            };
        }
    }
    for line in verdicts(ranks) {
        let _ = writeln!(out, "{line}");
    }
    out
}

/// Whom the others wait for, by group.
fn verdicts(ranks: &[Rank]) -> Vec<String> {
    let mut out = Vec::new();
    let mut missing: Vec<u64> = (0..ranks.first().map_or(0, |r| r.ranks)).collect();
    missing.retain(|rank| ranks.iter().all(|r| r.rank != *rank));
    if !missing.is_empty() {
        out.push(format!("{} on no process of this machine", name(&missing)));
    }
    let mut groups: BTreeMap<&str, Vec<(&Rank, &Collective)>> = BTreeMap::new();
    for rank in ranks {
        let mut own: BTreeMap<&str, &Collective> = BTreeMap::new(); // the latest, as they are in order
        own.extend(rank.collectives.iter().map(|c| (c.group.as_str(), c)));
        own.into_iter().for_each(|(group, c)| groups.entry(group).or_default().push((rank, c)));
    }
    for (group, latest) in groups {
        let Some(most) = latest.iter().filter(|(_, c)| c.state == "waits").map(|(_, c)| c.number).max()
        else {
            continue;
        };
        let of = |wanted: &dyn Fn(&Rank, &Collective) -> bool| -> Vec<u64> {
            latest.iter().filter(|(r, c)| wanted(r, c)).map(|(r, _)| r.rank).collect()
        };
        let wait = of(&|r, c| r.runs && c.state == "waits" && c.number == most);
        let late = of(&|r, c| r.runs && c.number < most);
        let gone = of(&|r, c| !r.runs && c.number <= most);
        let words: Vec<&str> =
            latest.iter().filter(|(_, c)| c.number == most).map(|(_, c)| c.what.as_str()).collect();
        if !late.is_empty() && !wait.is_empty() {
            out.push(format!(
                "{} not come to number {most} of group {group}, where {}",
                does(&late, "has", "have"),
                does(&wait, "waits", "wait")
            ));
        }
        if !gone.is_empty() && !wait.is_empty() {
            out.push(format!(
                "{} ended, and {} in number {most} of group {group}",
                does(&gone, "has", "have"),
                does(&wait, "waits", "wait")
            ));
        }
        if words.windows(2).any(|w| w[0] != w[1]) {
            out.push(format!("number {most} of group {group} is not the same on all ranks"));
        }
    }
    out
}

fn name(ranks: &[u64]) -> String {
    let all: Vec<String> = ranks.iter().map(u64::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, all.join(", "))
}

fn does(ranks: &[u64], one: &str, several: &str) -> String {
    format!("{} {}", name(ranks), if ranks.len() == 1 { one } else { several })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(number: u64, latest: u64, state: &str, runs: bool) -> Rank {
        let head = format!(
            r#"{{"rank":{number},"ranks":3,"run":"r","process":{},"host":"h","began_unix_s":{}}}"#,
            10 + number,
            number
        );
        let slot = |n: u64, state: &str| {
            format!(
                r#"{{"entry":{n},"group":"0","number":{n},"what":"all_reduce(float32[3])","line":"/a/train.py:{n} in f","state":"{state}","began_unix_s":100.0}}"#
            )
        };
        // The newest is not always the last in the file, and one may be half written.
        let text = format!("{head}\n{}   \n{}\n{{\"entry\":", slot(latest, state), slot(latest - 1, "done"));
        parse(&text, |_| runs).unwrap()
    }

    #[test]
    fn it_says_whom_the_others_wait_for() {
        let ranks =
            latest(vec![rank(2, 7, "waits", true), rank(0, 7, "waits", true), rank(1, 6, "done", true)]);
        assert_eq!(ranks.iter().map(|r| r.rank).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(verdicts(&ranks), ["rank 1 has not come to number 7 of group 0, where ranks 0, 2 wait"]);
        let shown = anstream::adapter::strip_str(&text(&ranks, 1, 112.0)).to_string();
        assert!(shown.contains("   0       10  waits           7  all_reduce(float32[3])"), "{shown}");
        assert!(shown.contains("12.0 s  train.py:7 in f"), "{shown}");
        assert_eq!(shown.lines().count(), 5, "{shown}");
        assert_eq!(text(&ranks, 2, 112.0).lines().count(), 8);
    }

    #[test]
    fn ranks_that_ended_or_never_were_are_named() {
        let ranks = latest(vec![rank(0, 7, "waits", true), rank(1, 7, "waits", false)]);
        let said = verdicts(&ranks);
        assert_eq!(said[0], "rank 2 on no process of this machine");
        assert_eq!(said[1], "rank 1 has ended, and rank 0 waits in number 7 of group 0");
        assert!(parse("", |_| true).is_none() && parse("{}", |_| true).is_none());
    }
}
