//! `oxitorch cache`: what compiled programs are kept on the disk, and keeping them in bounds.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anstyle::{AnsiColor, Style};
use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use oxitorch_cache::{DISK_BYTES, Folder, Listed, Shared, Sharing, Store, Stored, listing, programs_folder};
use serde_json::json;

use crate::facts::{Facts, Programs};
use crate::script;
use oxitorch_format::{bytes, cut, duration, many};

/// Which cache.
#[derive(Args)]
pub(crate) struct Which {
    /// The cache folder to look at [default: the one that programs use]
    #[arg(long, value_name = "DIR", global = true)]
    dir: Option<PathBuf>,
    /// Look at the folder or object store that machines share, OXITORCH_CACHE_SHARED
    #[arg(long, global = true, conflicts_with = "dir")]
    shared: bool,
}

#[derive(Subcommand)]
pub(crate) enum Do {
    /// List the compiled programs
    Ls {
        /// Only those whose name, id or ops have this in them
        text: Option<String>,
        /// What comes first
        #[arg(long, value_enum, default_value = "used")]
        sort: Sort,
        /// Print so many at most
        #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
        limit: usize,
        /// Also print everything that a program depends on
        #[arg(long, short)]
        long: bool,
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Sum up: how many programs, what they take, what they have saved
    Stats {
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Remove what is damaged, left behind, too old or too much
    ///
    /// Processes do this by themselves for the size on the disk; what machines share is bounded by running this.
    Gc {
        /// Remove the programs used least lately until the rest has less than this, for instance 2G
        #[arg(long, value_name = "SIZE", value_parser = size)]
        max_size: Option<u64>,
        /// Remove the programs that were not used for so many days
        #[arg(long, value_name = "DAYS")]
        max_age: Option<u64>,
    },
    /// Remove all compiled programs
    Clear,
    /// Fill the cache: copy programs from another folder, or run a script, and say what was added
    ///
    /// In an image or a CI job: `oxitorch cache warm train.py --steps 2`, then keep the cache folder.
    Warm {
        /// Copy programs from this cache folder
        #[arg(long, value_name = "DIR", required_unless_present = "script")]
        from: Option<PathBuf>,
        /// A Python script with its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "SCRIPT")]
        script: Vec<String>,
    },
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Sort {
    /// Last use
    Used,
    /// Bytes
    Size,
    /// Time of writing
    Created,
    /// Number of uses
    Hits,
    /// Time that compiling took
    Cost,
}

/// Runs a subcommand; what it says and the exit status.
pub(crate) fn run(which: &Which, what: Do, facts: &Facts) -> anyhow::Result<(String, i32)> {
    let programs = &facts.programs;
    let place = which.place(facts)?;
    let text = match what {
        Do::Ls { text, sort, limit, long, json } => {
            let mut found = listed(&place)?;
            found.retain(|e| text.as_ref().is_none_or(|t| mentions(e, t)));
            sort.apply(&mut found);
            found.truncate(limit);
            if json { to_json(&found)? } else { table(&found, long) }
        }
        Do::Stats { json } => {
            let mut sum = Sum::of(&place)?;
            sum.shared = which.is_default().then_some(programs.shared.as_deref()).flatten().map(Glance::at);
            if json { sum.json()? } else { sum.text(&place, which.limit(programs)) }
        }
        Do::Gc { max_size, max_age } => collect(&place, max_size.or(which.limit(programs)), max_age)?,
        Do::Clear => {
            let removed = listing::clear(&*place.store).with_context(|| place.unusable())?;
            place.store.clean();
            if let Some(folder) = &place.folder {
                place.programs(folder).remove_if_empty();
            }
            format!("removed {}, {}\n", many(removed.entries, "program"), bytes(removed.bytes))
        }
        Do::Warm { from, script } => return warm(&place, from.as_deref(), &script, facts),
    };
    Ok((text, 0))
}

impl Which {
    fn place(&self, facts: &Facts) -> anyhow::Result<ProgramStore> {
        match (&self.dir, self.shared) {
            (Some(dir), _) => Ok(ProgramStore::folder(dir, Sharing::Machine)),
            (None, true) => {
                let place = facts.programs.shared.as_deref().context("OXITORCH_CACHE_SHARED is not set")?;
                ProgramStore::shared(place)
            }
            (None, false) => Ok(ProgramStore::folder(&facts.cache_dir, Sharing::Machine)),
        }
    }

    /// Whether it is the one that programs of this machine use first.
    fn is_default(&self) -> bool {
        self.dir.is_none() && !self.shared
    }

    /// What processes keep the folder below, if they do.
    fn limit(&self, programs: &Programs) -> Option<u64> {
        (!self.shared).then(|| programs.bytes.unwrap_or(DISK_BYTES))
    }
}

/// Where compiled programs are.
struct ProgramStore {
    store: Arc<dyn Store>,
    name: String,
    /// The cache folder, unless it is an object store.
    folder: Option<PathBuf>,
    sharing: Sharing,
}

impl ProgramStore {
    fn folder(cache: &Path, sharing: Sharing) -> ProgramStore {
        ProgramStore {
            store: Arc::new(Folder::of_programs(cache, sharing)),
            name: cache.display().to_string(),
            folder: Some(cache.to_owned()),
            sharing,
        }
    }

    fn shared(place: &str) -> anyhow::Result<ProgramStore> {
        if !place.contains("://") {
            return Ok(ProgramStore::folder(Path::new(place), Sharing::Network));
        }
        let shared = open_shared(place).with_context(|| format!("OXITORCH_CACHE_SHARED={place}"))?;
        let (store, name) = (shared.contents(), shared.place().to_owned());
        Ok(ProgramStore { store, name, folder: None, sharing: Sharing::Network })
    }

    fn programs(&self, cache: &Path) -> Folder {
        Folder::of_programs(cache, self.sharing)
    }

    fn unusable(&self) -> String {
        format!("the cache in {}", self.name)
    }
}

/// What machines share, with the settings that the environment has for it.
pub(crate) fn open_shared(place: &str) -> std::io::Result<Shared> {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    Shared::open(place, &std::env::vars_os().filter_map(text).collect::<Vec<_>>())
}

fn listed(place: &ProgramStore) -> anyhow::Result<Vec<Listed>> {
    listing::list(&*place.store).with_context(|| place.unusable())
}

/// What can be said of the other tier in a moment.
struct Glance {
    place: String,
    found: Result<(u64, u64), String>,
}

impl Glance {
    fn at(place: &str) -> Glance {
        let look = || -> anyhow::Result<(u64, u64)> {
            let files = ProgramStore::shared(place)?.store.list()?;
            let entries = || files.iter().filter(|f| f.name.ends_with(".oxi"));
            Ok((entries().count() as u64, entries().map(|f| f.size).sum()))
        };
        Glance { place: place.to_owned(), found: look().map_err(|e| format!("{e:#}")) }
    }

    fn json(&self) -> serde_json::Value {
        match &self.found {
            Ok((programs, size)) => json!({ "place": self.place, "programs": programs, "bytes": size }),
            Err(error) => json!({ "place": self.place, "error": error }),
        }
    }

    fn text(&self) -> String {
        match &self.found {
            Ok((programs, size)) => {
                format!("{}: {}, {}", self.place, many(*programs, "program"), bytes(*size))
            }
            Err(error) => format!("{} cannot be read: {error}", self.place),
        }
    }
}

/// "2G" -> 2147483648.
fn size(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_lowercase();
    let number = lower.trim_end_matches('b').trim_end_matches('i');
    let (number, unit) = match number.char_indices().next_back() {
        Some((at, 'k')) => (&number[..at], 1 << 10),
        Some((at, 'm')) => (&number[..at], 1 << 20),
        Some((at, 'g')) => (&number[..at], 1 << 30),
        Some((at, 't')) => (&number[..at], 1u64 << 40),
        _ => (number, 1),
    };
    match number.trim().parse::<f64>() {
        Ok(n) if n >= 0.0 && n.is_finite() => Ok((n * unit as f64) as u64),
        _ => Err("expected a size such as 500M or 2G".into()),
    }
}

fn mentions(entry: &Listed, text: &str) -> bool {
    entry.file.starts_with(text)
        || entry.meta.name.contains(text)
        || entry.meta.notes.iter().any(|(_, note)| note.contains(text))
}

impl Sort {
    fn apply(self, entries: &mut [Listed]) {
        entries.sort_by_key(|e| {
            std::cmp::Reverse(match self {
                Sort::Used => e.used.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos(),
                Sort::Size => e.size.into(),
                Sort::Created => e.meta.created_ms.into(),
                Sort::Hits => e.hits.into(),
                Sort::Cost => e.meta.cost_us.into(),
            })
        });
    }
}

fn to_json(entries: &[Listed]) -> anyhow::Result<String> {
    let one = |e: &Listed| {
        let key = e.meta.key.components().iter();
        let key = key.map(|c| (c.name.to_string(), json!({ "digest": c.digest, "text": c.text })));
        json!({
            "id": e.file.trim_end_matches(".oxi"),
            "name": e.meta.name,
            "bytes": e.size,
            "hits": e.hits,
            "compile_s": e.meta.cost_us as f64 * 1e-6,
            "created_ms": e.meta.created_ms,
            "used_ms": e.used.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64,
            "notes": e.meta.notes.iter().map(|(n, v)| (n.clone(), json!(v))).collect::<serde_json::Map<_, _>>(),
            "key": key.collect::<serde_json::Map<_, _>>(),
        })
    };
    let all: Vec<_> = entries.iter().map(one).collect();
    Ok(serde_json::to_string_pretty(&all)? + "\n")
}

fn table(entries: &[Listed], long: bool) -> String {
    let bold = Style::new().bold();
    let dim = Style::new().dimmed();
    let name_style = AnsiColor::Cyan.on_default();
    let mut out = format!(
        "{bold}{:12}  {:>10}  {:>9}  {:>6}  {:>12}  program{bold:#}\n",
        "id", "size", "compile", "hits", "used"
    );
    for e in entries {
        let note = |name: &str| e.meta.notes.iter().find(|(n, _)| n == name).map_or("", |(_, v)| v);
        let _ = writeln!(
            out,
            "{:12}  {:>10}  {:>9}  {:>6}  {:>12}  {name_style}{}{name_style:#} {dim}({}){dim:#}",
            e.file.get(..12).unwrap_or(&e.file),
            bytes(e.size),
            duration(Duration::from_micros(e.meta.cost_us)),
            e.hits,
            ago(e.used),
            e.meta.name,
            cut(note("inputs"), 60),
        );
        if long {
            for (name, value) in &e.meta.notes {
                let _ = writeln!(out, "{:14}{name}: {}", "", cut(value, 160));
            }
            for c in e.meta.key.components() {
                let value = c.text.as_deref().filter(|t| !t.contains('\n')).unwrap_or(&c.digest);
                let _ = writeln!(out, "{:14}{dim}{}: {}{dim:#}", "", c.name, cut(value, 160));
            }
        }
    }
    out
}

fn ago(time: SystemTime) -> String {
    let seconds = time.elapsed().unwrap_or_default().as_secs();
    match seconds {
        0..60 => "now".to_owned(),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..86_400 => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}

/// The cache in numbers.
struct Sum {
    programs: u64,
    bytes: u64,
    hits: u64,
    compile: Duration,
    saved: Duration,
    last_use: Option<SystemTime>,
    /// Files of other versions of the format.
    other_formats: u64,
    other_bytes: u64,
    /// Processes that compile for this folder at the moment, or died doing so.
    leases: u64,
    /// What machines share, if there is anything.
    shared: Option<Glance>,
}

impl Sum {
    fn of(place: &ProgramStore) -> anyhow::Result<Sum> {
        let entries = listed(place)?;
        let other = other_formats(place);
        let files = place.store.list().with_context(|| place.unusable())?;
        let micros = |f: &dyn Fn(&Listed) -> u64| Duration::from_micros(entries.iter().map(f).sum());
        Ok(Sum {
            programs: entries.len() as u64,
            bytes: entries.iter().map(|e| e.size).sum(),
            hits: entries.iter().map(|e| e.hits).sum(),
            compile: micros(&|e| e.meta.cost_us),
            saved: micros(&|e| e.meta.cost_us.saturating_mul(e.hits)),
            last_use: entries.iter().map(|e| e.used).max(),
            other_formats: other.len() as u64,
            other_bytes: other.iter().map(|(_, f)| f.size).sum(),
            leases: files.iter().filter(|f| f.name.ends_with(".lease")).count() as u64,
            shared: None,
        })
    }

    fn json(&self) -> anyhow::Result<String> {
        let value = json!({
            "programs": self.programs,
            "bytes": self.bytes,
            "hits": self.hits,
            "compile_s": self.compile.as_secs_f64(),
            "saved_s": self.saved.as_secs_f64(),
            "last_use_ms": self.last_use.map(|t| t.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64),
            "other_formats": { "files": self.other_formats, "bytes": self.other_bytes },
            "leases": self.leases,
            "shared": self.shared.as_ref().map(Glance::json),
        });
        Ok(serde_json::to_string_pretty(&value)? + "\n")
    }

    fn text(&self, place: &ProgramStore, limit: Option<u64>) -> String {
        let bold = Style::new().bold();
        let mut out = String::new();
        let mut line = |name: &str, value: String| _ = writeln!(out, "{bold}{name:12}{bold:#} {value}");
        line(if place.folder.is_some() { "folder" } else { "store" }, place.name.clone());
        let of = limit.map_or(String::new(), |l| format!(" of {}", bytes(l)));
        line("programs", format!("{}, {}{of}", self.programs, bytes(self.bytes)));
        line("compiled in", duration(self.compile));
        line(
            "used",
            format!("{}, which saved {} of compiling", many(self.hits, "time"), duration(self.saved)),
        );
        if let Some(at) = self.last_use {
            line("last use", ago(at));
        }
        if self.leases > 0 {
            line("in work", many(self.leases, "program"));
        }
        if self.other_formats > 0 {
            let files = many(self.other_formats, "file");
            line("other", format!("{files} of other versions of oxitorch, {}", bytes(self.other_bytes)));
        }
        if let Some(shared) = &self.shared {
            line("shared", shared.text());
        }
        out
    }
}

/// Files in the folders of other versions of the format.
fn other_formats(place: &ProgramStore) -> Vec<(Folder, Stored)> {
    let Some(cache) = &place.folder else { return Vec::new() };
    let own = programs_folder(cache);
    let formats = fs::read_dir(cache.join("programs")).into_iter().flatten().flatten();
    let others = formats.map(|f| f.path()).filter(|p| p.is_dir() && *p != own);
    let files = others.flat_map(|path| {
        let folder = Folder::new(path, Sharing::Machine);
        let files = folder.list().unwrap_or_default();
        files.into_iter().map(move |f| (folder.clone(), f))
    });
    files.collect()
}

/// Files of other formats that nobody used for so long are removed.
const OTHER_FORMAT_AGE: Duration = Duration::from_secs(30 * 86_400);

fn collect(place: &ProgramStore, max_size: Option<u64>, max_age: Option<u64>) -> anyhow::Result<String> {
    let store = &*place.store;
    let mut out = String::new();
    let mut say = |n: u64, what: &str, why: &str| {
        if n > 0 {
            let _ = writeln!(out, "removed {}{why}", many(n, what));
        }
    };
    let context = || place.unusable();
    if let Some(folder) = &place.folder {
        let stale = place.programs(folder).remove_stale().with_context(context)?;
        say(stale as u64, "file", " that a process left half written");
    }
    say(listing::remove_old_leases(store).with_context(context)?, "lease", " of processes that are gone");
    say(listing::remove_damaged(store).with_context(context)?, "damaged program", "");
    if let Some(days) = max_age {
        let old = listing::evict_older(store, Duration::from_secs(days.saturating_mul(86_400)));
        say(old.with_context(context)?.entries, "program", &format!(" not used for {}", many(days, "day")));
    }
    let evicted = listing::evict(store, max_size).with_context(context)?;
    say(evicted.entries, "program", " used least lately");
    let mut others = 0;
    for (other, file) in other_formats(place) {
        if file.modified.elapsed().is_ok_and(|age| age > OTHER_FORMAT_AGE) {
            others += u64::from(other.remove(&file.name).with_context(|| place.unusable())?);
            other.remove_if_empty();
        }
    }
    say(others, "file", " of other versions of oxitorch");
    let left = listed(place)?.len() as u64;
    let _ = writeln!(out, "{} left, {}", many(left, "program"), bytes(evicted.left_bytes));
    Ok(out)
}

fn warm(
    place: &ProgramStore,
    from: Option<&Path>,
    script: &[String],
    facts: &Facts,
) -> anyhow::Result<(String, i32)> {
    let mut out = String::new();
    if let Some(from) = from {
        let source = Folder::of_programs(from, Sharing::Network);
        if !source.path().is_dir() {
            bail!("{} has no compiled programs of this version", from.display());
        }
        let copied = listing::copy(&source, &*place.store).with_context(|| place.unusable())?;
        let copies = many(copied.entries, "program");
        let _ = write!(out, "copied {copies}, {}; {} were there", bytes(copied.bytes), copied.known);
        let damaged = many(copied.damaged, "damaged one");
        out += &if copied.damaged > 0 { format!("; left out {damaged}\n") } else { "\n".to_owned() };
    }
    if script.is_empty() {
        return Ok((out, 0));
    }
    if !facts.programs.on {
        bail!("the cache is off: unset OXITORCH_CACHE, and --xla_dump flags in XLA_FLAGS");
    }
    let Some(folder) = &place.folder else {
        bail!(
            "{} is filled by any run with OXITORCH_CACHE_SHARED set: leave out `--shared`, or copy a folder to it \
             with `oxitorch cache warm --shared --from`",
            place.name
        );
    };
    let known: std::collections::HashSet<String> = listed(place)?.into_iter().map(|e| e.file).collect();
    let status = script::run(script, &[("OXITORCH_CACHE_DIR", folder.as_os_str())], facts)?;
    let (old, new): (Vec<_>, Vec<_>) = listed(place)?.into_iter().partition(|e| known.contains(&e.file));
    let cost = Duration::from_micros(new.iter().map(|e| e.meta.cost_us).sum());
    let size: u64 = new.iter().map(|e| e.size).sum();
    let _ = writeln!(
        out,
        "compiled {} in {}, {}; {} were there",
        many(new.len() as u64, "program"),
        duration(cost),
        bytes(size),
        old.len()
    );
    Ok((out, status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, value) in
            [("1000", 1000), ("2k", 2048), ("1.5G", 3 << 29), ("20 MiB", 20 << 20), ("1TB", 1 << 40)]
        {
            assert_eq!(size(text), Ok(value), "{text}");
        }
        for text in ["", "much", "-1", "1P", "nan", "G"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_short() {
        assert_eq!(duration(Duration::from_millis(15)), "15 ms");
        assert_eq!(duration(Duration::from_secs(150)), "2.5 min");
        assert_eq!(ago(SystemTime::now() - Duration::from_secs(7200)), "2 h ago");
    }
}
