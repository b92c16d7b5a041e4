//! `oxitorch trace merge`: the timelines of several processes as one.
//!
//! Each rank's lanes come under its number. Its clock is set by the collectives that it shares with the first rank, which
//! all leave at nearly one time; where there are too few, by the clock on the wall. Arrows go through a collective's
//! slices in the order in which the ranks came to it: the last one is who the others waited for.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anstyle::{AnsiColor, Style};
use anyhow::{Context, bail};
use clap::Args;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use oxitorch_format::bytes;
use serde_json::{Value, json};

/// Numbers of lanes' processes of one rank.
const OF_A_RANK: u64 = 1000;
/// So many collectives that two ranks share say how their clocks differ.
const ENOUGH: usize = 3;

#[derive(Args)]
pub(crate) struct Merge {
    /// The file to write; compressed if its name ends with .gz
    #[arg(long, short, value_name = "FILE", default_value = "oxitorch-trace.json.gz")]
    output: PathBuf,
    /// The timelines of the ranks
    #[arg(required = true, num_args = 2.., value_name = "TIMELINE")]
    timelines: Vec<PathBuf>,
}

pub(crate) fn run(merge: &Merge) -> anyhow::Result<i32> {
    let read = merge.timelines.iter().map(|path| Timeline::read(path)).collect::<anyhow::Result<Vec<_>>>()?;
    let merged = merged(read)?;
    write(&merge.output, &merged)?;
    let (name, dim) = (AnsiColor::Cyan.on_default(), Style::new().dimmed());
    anstream::eprintln!(
        "{name}{}{name:#}, {} {dim}→ open it at https://ui.perfetto.dev{dim:#}",
        merge.output.display(),
        bytes(merge.output.metadata()?.len())
    );
    Ok(0)
}

/// The timeline of a process.
struct Timeline {
    name: String,
    rank: Option<u64>,
    began_s: Option<f64>,
    events: Vec<Value>,
}

impl Timeline {
    fn read(path: &Path) -> anyhow::Result<Timeline> {
        let name = path.display().to_string();
        let open = || -> anyhow::Result<Value> {
            let file = BufReader::new(File::open(path)?);
            let mut text = Vec::new();
            if path.extension().is_some_and(|e| e == "gz") {
                GzDecoder::new(file).read_to_end(&mut text)?;
            } else {
                BufReader::new(file).read_to_end(&mut text)?;
            }
            Ok(serde_json::from_slice(&text)?)
        };
        let json = open().with_context(|| format!("cannot read {name}"))?;
        Timeline::of(name, json)
    }

    fn of(name: String, mut json: Value) -> anyhow::Result<Timeline> {
        let Value::Array(events) = json["traceEvents"].take() else { bail!("{name} is no timeline") };
        let of = &json["otherData"];
        Ok(Timeline { name, rank: of["rank"].as_u64(), began_s: of["began_unix_s"].as_f64(), events })
    }

    /// Its collectives, by group and number: where the slice is, from when to when, in microseconds.
    fn collectives(&self) -> BTreeMap<(String, u64), Slice> {
        let slice = |e: &Value| {
            let key = (e["args"]["group"].as_str()?.to_owned(), e["args"]["number"].as_u64()?);
            let (start, took) = (e["ts"].as_f64()?, e["dur"].as_f64()?);
            let lane = (e["pid"].as_u64()?, e["tid"].as_u64()?);
            (e["cat"] == "collective").then_some((key, Slice { lane, start, end: start + took }))
        };
        self.events.iter().filter_map(slice).collect()
    }
}

#[derive(Clone, Copy)]
struct Slice {
    lane: (u64, u64),
    start: f64,
    end: f64,
}

/// Microseconds to add to the second's times, so that both are of one clock.
fn shift(first: &Timeline, second: &Timeline) -> f64 {
    let (a, b) = (first.collectives(), second.collectives());
    let mut apart: Vec<f64> = b.iter().filter_map(|(key, s)| Some(a.get(key)?.end - s.end)).collect();
    if apart.len() >= ENOUGH {
        apart.sort_unstable_by(f64::total_cmp);
        return apart[apart.len() / 2];
    }
    match (first.began_s, second.began_s) {
        (Some(a), Some(b)) => (b - a) * 1e6,
        _ => 0.0,
    }
}

fn merged(mut timelines: Vec<Timeline>) -> anyhow::Result<Value> {
    timelines.sort_by_key(|t| t.rank);
    let mut taken = BTreeMap::new();
    for (i, t) in timelines.iter_mut().enumerate() {
        let rank = *t.rank.get_or_insert(i as u64);
        if let Some(other) = taken.insert(rank, t.name.clone()) {
            bail!("{other} and {} are both of rank {rank}", t.name);
        }
    }
    let mut shifts: Vec<f64> = timelines.iter().map(|t| shift(&timelines[0], t)).collect();
    // Nothing before zero, which some viewers do not show.
    let least = shifts.iter().copied().fold(0.0, f64::min);
    shifts.iter_mut().for_each(|s| *s -= least);
    let mut together: BTreeMap<(String, u64), Vec<Slice>> = BTreeMap::new();
    let mut events = Vec::new();
    for (timeline, shift) in timelines.into_iter().zip(&shifts) {
        let rank = timeline.rank.unwrap_or_default();
        for (key, s) in timeline.collectives() {
            let lane = (s.lane.0 + rank * OF_A_RANK, s.lane.1);
            together.entry(key).or_default().push(Slice { lane, start: s.start + shift, end: s.end + shift });
        }
        events.extend(timeline.events.into_iter().map(|event| of_rank(event, rank, *shift)));
    }
    for (number, ((group, _), mut slices)) in together.into_iter().enumerate() {
        slices.sort_unstable_by(|a, b| a.start.total_cmp(&b.start));
        let last = slices.len() - 1;
        for (i, slice) in slices.into_iter().enumerate().filter(|_| last > 0) {
            let phase = if i == 0 {
                "s"
            } else if i == last {
                "f"
            } else {
                "t"
            };
            let id = format!("{group}/{number}");
            let (pid, tid) = slice.lane;
            let mut arrow = json!({"ph": phase, "pid": pid, "tid": tid, "cat": "ranks", "name": "ranks", "id": id,
                "ts": slice.start});
            if phase == "f" {
                arrow["bp"] = "e".into();
            }
            events.push(arrow);
        }
    }
    Ok(json!({"displayTimeUnit": "ms", "otherData": {"ranks": taken.into_keys().collect::<Vec<_>>()},
        "traceEvents": events}))
}

/// An event as one of a rank.
fn of_rank(mut event: Value, rank: u64, shift: f64) -> Value {
    if let Some(ts) = event["ts"].as_f64() {
        event["ts"] = json!(ts + shift);
    }
    if let Some(id) = event["id"].as_u64() {
        event["id"] = json!(format!("{rank}/{id}"));
    }
    let pid = event["pid"].as_u64().unwrap_or_default() + rank * OF_A_RANK;
    event["pid"] = pid.into();
    match event["name"].as_str() {
        Some("process_name") => {
            let name = event["args"]["name"].as_str().unwrap_or_default();
            event["args"]["name"] = json!(format!("rank {rank}: {name}"));
        }
        Some("process_sort_index") => event["args"]["sort_index"] = pid.into(),
        _ => {}
    }
    event
}

/// Under another name first, so that there is no half file.
fn write(path: &Path, json: &Value) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    let absolute = std::path::absolute(path)?;
    let folder = absolute.parent().unwrap_or(Path::new("/"));
    let file = tempfile::NamedTempFile::new_in(folder).with_context(cannot)?;
    let mut out = BufWriter::new(file.as_file());
    if path.extension().is_some_and(|e| e == "gz") {
        let mut packed = GzEncoder::new(&mut out, Compression::new(4));
        serde_json::to_writer(&mut packed, json)?;
        packed.finish()?;
    } else {
        serde_json::to_writer(&mut out, json)?;
    }
    out.flush().with_context(cannot)?;
    drop(out);
    file.persist(&absolute).with_context(cannot)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank whose clock is `late` microseconds behind, and whose collectives take so long until they end at 100, 200...
    fn rank(number: u64, late: f64, took: [f64; 4]) -> Timeline {
        let mut events = vec![
            json!({"ph": "M", "pid": 4, "tid": 0, "name": "process_name", "args": {"name": "collectives"}}),
            json!({"ph": "s", "pid": 2, "tid": 1, "cat": "launch", "name": "launch", "id": 5, "ts": 1.0}),
        ];
        for (i, took) in took.into_iter().enumerate() {
            let end = 100.0 * (i + 1) as f64 - late;
            events.push(json!({"ph": "X", "pid": 4, "tid": 9, "cat": "collective", "name": "all_reduce",
                "ts": end - took, "dur": took, "args": {"group": "0", "number": i + 1}}));
        }
        let json = json!({"otherData": {"rank": number}, "traceEvents": events});
        Timeline::of(format!("rank {number}"), json).unwrap()
    }

    #[test]
    fn clocks_are_set_by_collectives_and_arrows_go_to_who_came_last() {
        let merged = merged(vec![rank(1, 30.0, [5.0, 50.0, 5.0, 5.0]), rank(0, 0.0, [20.0; 4])]).unwrap();
        let events = merged["traceEvents"].as_array().unwrap();
        let slices: Vec<(u64, f64)> = events
            .iter()
            .filter(|e| e["ph"] == "X")
            .map(|e| (e["pid"].as_u64().unwrap(), e["ts"].as_f64().unwrap() + e["dur"].as_f64().unwrap()))
            .collect();
        let ends = [100.0, 200.0, 300.0, 400.0];
        let expected: Vec<_> = [4, 1004].into_iter().flat_map(|pid| ends.map(|end| (pid, end))).collect();
        assert_eq!(slices, expected);
        let arrows: Vec<(&str, u64, f64)> = events
            .iter()
            .filter(|e| e["cat"] == "ranks")
            .map(|e| (e["ph"].as_str().unwrap(), e["pid"].as_u64().unwrap(), e["ts"].as_f64().unwrap()))
            .collect();
        assert_eq!(arrows[..4], [("s", 4, 80.0), ("f", 1004, 95.0), ("s", 1004, 150.0), ("f", 4, 180.0)]);
        assert!(events.iter().any(|e| e["args"]["name"] == "rank 1: collectives"));
        assert!(events.iter().any(|e| e["id"] == "1/5") && events.iter().any(|e| e["id"] == "0/5"));
    }

    #[test]
    fn two_timelines_of_one_rank_are_refused() {
        let error = merged(vec![rank(1, 0.0, [1.0; 4]), rank(1, 0.0, [1.0; 4])]).unwrap_err().to_string();
        assert_eq!(error, "rank 1 and rank 1 are both of rank 1");
        assert!(Timeline::of("x".into(), json!({})).is_err());
    }
}
