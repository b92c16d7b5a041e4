//! What the page says about a slice, section by section. A new one is a function here and its name in [`of`].

use super::{bound, tone};
use oxitorch_capture::{Moved, Role, Undonated};
use oxitorch_format::{amount, bytes, many, short};
use oxitorch_page::{BarRow, Bars, Cell, Chart, Dot, Roofline, Section, Stack, Table};

use crate::answer::{Judged, Judgement};
use crate::hardware::ici::Total;
use crate::hardware::{gpus, named};
use crate::memory::Tensor;
use crate::show::words::{mark, time};
use crate::show::{found, notes, sent};

/// All sections that have something to say.
pub(super) fn of(s: &Judged) -> Vec<Section> {
    let all = [
        budget,
        fit,
        split,
        memory,
        advice,
        buffers,
        tensors,
        roofline,
        times,
        collectives,
        calling_lines,
        programs,
        waits,
        fallbacks,
        padding,
        tiles,
        undonated,
    ];
    all.iter().filter_map(|section| section(s)).collect()
}

fn advice(s: &Judged) -> Option<Section> {
    let p = s.needed()?;
    let rows = p.advice.iter().map(|a| {
        let lines = a.lines.iter().map(|(line, n)| format!("{} in {}", bytes(*n), short(line)));
        let lines = lines.collect::<Vec<_>>().join(", ");
        vec![Cell::number(bytes(a.bytes)), Cell::text(found::whole(a)), Cell::text(lines)]
    });
    let table = Some(Table::new(&["saves about#", "what to do", "where"], rows));
    let lead = match found::source(p) {
        source if p.advice.iter().all(|a| a.compiled.is_some()) => format!("All of it was {source}."),
        source => format!("From the buffers at the peak ({source})."),
    };
    Some(Section { title: "What makes it smaller".into(), lead, table, ..Section::default() })
}

fn split(s: &Judged) -> Option<Section> {
    let told = s.parallel.as_ref()?;
    let mesh: Vec<String> = told.mesh.iter().map(|(axis, n)| format!("{axis} {n}")).collect();
    let lead = format!("{}; mesh: {}.", capital(&told.words()), mesh.join(", "));
    let rows = told.notes.iter().map(|n| vec![Cell::text(n.clone())]);
    let table = (!told.notes.is_empty()).then(|| Table::new(&["what may not be as it was meant"], rows));
    Some(Section { title: "How the step is split over the chips".into(), lead, table, ..Section::default() })
}

fn collectives(s: &Judged) -> Option<Section> {
    let all = &s.step.as_ref()?.collectives;
    if all.is_empty() {
        return None;
    }
    let most = longest(all.iter().map(|c| &c.total));
    let rows = all.iter().map(|c| {
        let mut row = vec![Cell::code(c.kind.clone())];
        row.extend(total(&c.total, most));
        row
    });
    let table = Some(Table::new(&["collective", "in a step#", "bytes a chip#", "at least#"], rows));
    let apart = s.step.as_ref().and_then(|t| t.without_overlap_s).map_or_else(String::new, |least| {
        format!(" If nothing is computed meanwhile, a step takes at least {}.", time(least))
    });
    let lead = format!("What the chips send each other in a step.{apart}");
    Some(Section { title: "Collectives".into(), lead, table, ..Section::default() })
}

fn calling_lines(s: &Judged) -> Option<Section> {
    let processes = s.processes.as_ref().filter(|p| !p.lines.is_empty())?;
    let most = longest(processes.lines.iter().map(|l| &l.total));
    let rows = processes.lines.iter().map(|l| {
        let asked = sent::asked(processes, &l.line).join("\n");
        let mut row = vec![Cell::line(l.line.as_deref()), Cell { class: "lines", ..Cell::text(asked) }];
        row.extend(total(&l.total, most));
        row
    });
    let head = ["line", "asks for", "in a step#", "bytes a chip#", "at least#"];
    let lead =
        "Where the script asks for them; what the backward pass of a line asks for is shown at that line.";
    Some(Section {
        title: "Collectives by Python line".into(),
        lead: lead.to_owned(),
        table: Some(Table::new(&head, rows)),
        ..Section::default()
    })
}

/// The longest time of collectives, 0 if none is known.
fn longest<'a>(all: impl Iterator<Item = &'a Total>) -> f64 {
    all.filter_map(|t| t.ici_s).fold(0.0, f64::max)
}

/// Cells for how many collectives there are, of how many bytes and how long; a bar is relative to `most`.
fn total(t: &Total, most: f64) -> [Cell; 3] {
    let least = t.ici_s.map_or_else(
        || Cell { class: "number dim", ..Cell::text("not known") },
        |x| Cell::number(time(x)).filled(if most > 0.0 { x / most } else { 0.0 }),
    );
    [Cell::number(t.count.to_string()), Cell::number(bytes(t.bytes)), least]
}

fn budget(s: &Judged) -> Option<Section> {
    if s.budget.is_empty() {
        return None;
    }
    let number = |name: &str, x: Option<f64>| match (name, x) {
        (_, None) => Cell::number("not known"),
        ("hbm", Some(n)) => Cell::number(bytes(n as u64)),
        (_, Some(n)) => Cell::number(format!("{}", (n * 1e3).round() / 1e3)),
    };
    let rows = s.budget.iter().map(|h| {
        let (class, text) = match h.ok {
            Some(true) => ("good", "✓ kept"),
            Some(false) => ("bad", "✗ not kept"),
            None => ("doubt", "? not known"),
        };
        let held = Cell { class, ..Cell::text(text) };
        vec![Cell::text(h.name), held, number(h.name, h.value), number(h.name, h.limit)]
    });
    let table = Some(Table::new(&["limit", "", "is#", "at most#"], rows));
    Some(Section { title: "Budget".into(), table, ..Section::default() })
}

fn fit(s: &Judged) -> Option<Section> {
    let fitted = s.fit.as_ref()?;
    let mut tries: Vec<_> = fitted.tries.iter().collect();
    tries.sort_by_key(|t| t.batch);
    let rows = tries.iter().map(|t| {
        let verdict = Cell {
            class: tone(t.verdict),
            ..Cell::text(format!("{} {}", mark(t.verdict).0, mark(t.verdict).2))
        };
        let or_unknown = |x: Option<String>| Cell::number(x.unwrap_or_else(|| "not known".into()));
        let rate = t.samples_per_s.map(|r| format!("{r:.1}"));
        let (need, least) = (t.need_bytes.map(bytes), t.roofline_s.map(time));
        vec![
            Cell::number(t.batch.to_string()),
            verdict,
            or_unknown(need),
            or_unknown(least),
            or_unknown(rate),
        ]
    });
    let lead = match (fitted.batch, fitted.confirmed) {
        (Some(n), true) => format!("The largest batch that fits is {n}."),
        (Some(n), false) => format!("A batch of {n} fits; it was not found out which is the largest."),
        (None, true) => "No batch fits.".to_owned(),
        (None, false) => "No batch was found that fits.".to_owned(),
    };
    let head = ["batch#", "", "memory#", "a step takes at least#", "samples a second at most#"];
    Some(Section {
        title: "Largest batch".into(),
        lead,
        table: Some(Table::new(&head, rows)),
        ..Section::default()
    })
}

/// The program that needs most.
fn largest(s: &Judged) -> Option<&Judgement> {
    s.programs.iter().max_by_key(|p| p.need_bytes)
}

fn memory(s: &Judged) -> Option<Section> {
    let p = largest(s)?;
    let m = p.memory_bytes?;
    let code = p.need_bytes.unwrap_or(0).saturating_sub(p.beside_bytes + m.peak);
    // The parts of the compiler's peak; where they are not all alive at once, temporaries are what is left.
    let arguments = m.arguments.min(m.peak);
    let outputs = m.outputs.saturating_sub(m.aliased).min(m.peak - arguments);
    let mut parts = vec![
        ("arguments", "what goes in: parameters, optimizer state, the batch", "c1", arguments),
        ("outputs", "what comes out and has no argument's memory", "c2", outputs),
        (
            "temporaries",
            "between the two, at the peak: activations, gradients",
            "c3",
            m.peak - arguments - outputs,
        ),
        ("besides", "other tensors that are alive then", "c4", p.beside_bytes),
        ("programs", "the machine code of all programs", "c5", code),
    ];
    // A compiler for GPUs does not say how large its code is.
    parts.retain(|(label, _, _, n)| *n > 0 || *label != "programs");
    let mut lead = format!(
        "While {} runs, which needs most. {} of its outputs are in the memory of arguments.",
        p.name,
        bytes(m.aliased)
    );
    if let Some(share) = s.topology.as_deref().and_then(gpus::share) {
        lead += &format!(" The limit is {share}.");
    }
    let chart = Some(Chart::Stack(Stack::new(&parts, s.limit_bytes)));
    Some(Section { title: "Memory of a chip".into(), lead, chart, ..Section::default() })
}

/// What is alive when it needs most, if the compiler wrote that down.
fn buffers(s: &Judged) -> Option<Section> {
    let p = largest(s)?;
    let most = p.buffers_at_peak.first()?.bytes.max(1) as f64;
    let rows = p.buffers_at_peak.iter().map(|b| {
        let notes = [
            (b.backward, "backward"),
            (b.activation, "kept for the backward"),
            (b.overwritten, "overwritten"),
        ];
        let notes = notes.iter().filter(|(is, _)| *is).map(|(_, note)| *note);
        let role = std::iter::once(b.purpose.map_or(b.role, Role::name)).chain(notes);
        vec![
            Cell::number(bytes(b.bytes)).filled(b.bytes as f64 / most),
            Cell::fixed(b.r#type.clone()),
            Cell::text(role.collect::<Vec<_>>().join(", ")),
            Cell::line(b.line.as_deref()),
            Cell::code(b.name.clone().or_else(|| b.op.clone()).unwrap_or_default()),
        ]
    });
    let table = Some(Table::new(&["size#", "buffer", "", "made by", "operation or name"], rows));
    let lead = format!("Besides these, {} of smaller ones and gaps.", bytes(p.buffers_rest_bytes));
    let title = "Its largest buffers when it needs most".into();
    Some(Section { title, lead, table, ..Section::default() })
}

fn tensors(s: &Judged) -> Option<Section> {
    let p = largest(s).filter(|p| !p.tensors.is_empty() && p.buffers_at_peak.is_empty())?;
    // Those that are alike are one row.
    let mut alike: Vec<(&Tensor, u64)> = Vec::new();
    for t in &p.tensors {
        let same = |o: &&mut (&Tensor, u64)| {
            let of = |t: &Tensor| (t.role, t.overwritten, t.r#type.clone(), t.line.clone(), t.op.clone());
            of(o.0) == of(t)
        };
        match alike.iter_mut().find(same) {
            Some((_, n)) => *n += 1,
            None => alike.push((t, 1)),
        }
    }
    alike.sort_by_key(|(t, n)| std::cmp::Reverse(t.bytes * n));
    let most = alike.iter().map(|(t, n)| t.bytes * n).max().unwrap_or(1).max(1) as f64;
    let rows = alike.iter().map(|(t, n)| {
        let role = if t.overwritten { "argument, overwritten" } else { t.role };
        let op = Cell::code(t.op.clone().unwrap_or_default());
        let size = Cell::number(bytes(t.bytes * n)).filled((t.bytes * n) as f64 / most);
        let number = Cell::number(n.to_string());
        vec![
            size,
            number,
            Cell::fixed(t.r#type.to_string()),
            Cell::text(role),
            Cell::line(t.line.as_deref()),
            op,
        ]
    });
    let table = Some(Table::new(&["together#", "number#", "tensor", "", "made by", "operation"], rows));
    let title = "Its largest arguments and outputs".into();
    Some(Section { title, table, ..Section::default() })
}

/// Programs of the last step, those that take longest first.
fn of_step(s: &Judged) -> Vec<&Judgement> {
    let mut all: Vec<&Judgement> = s.programs.iter().filter(|p| p.launches_in_last_step > 0).collect();
    all.sort_by(|a, b| seconds(b).total_cmp(&seconds(a)));
    all
}

/// What a program takes of a step, at least.
fn seconds(p: &Judgement) -> f64 {
    p.launches_in_last_step as f64 * p.work.as_ref().and_then(|w| w.roofline_s).unwrap_or(0.0)
}

/// Programs that are drawn.
const DRAWN: usize = 8;

fn roofline(s: &Judged) -> Option<Section> {
    let chip = named(s.topology.as_ref()?.split(':').next()?)?;
    let work = &s.step.as_ref()?.work;
    let whole = work.roofline_s?;
    let dot = |p: &&Judgement| {
        let work = p.work.as_ref()?;
        Some(Dot {
            intensity: work.intensity,
            flops_per_s: work.flops / work.roofline_s.filter(|s| *s > 0.0)?,
            share: seconds(p) / whole,
            label: p.name.clone(),
            title: format!(
                "{}: {}FLOP, {} moved",
                p.name,
                amount(work.flops),
                bytes(work.bytes_accessed as u64)
            ),
        })
    };
    let dots = of_step(s).iter().take(DRAWN).filter_map(dot).collect();
    let chart = Roofline::new(chip.device_flops(), chip.device_bytes_per_s(), dots)?;
    let mut lead = format!(
        "{}FLOP, of which {}FLOP in products and convolutions, and {} to and from memory: {:.1} FLOP for a byte.",
        amount(work.operations()),
        amount(work.product_flops),
        bytes(work.bytes_accessed as u64),
        work.intensity
    );
    if let Some(of) = work.bound {
        lead += &format!(" {} bounds the step.", capital(bound(of, s.platform)));
    }
    lead += " Products of float32 take longer than those of bfloat16, so they lie below the roof.";
    let chart = Some(Chart::Roofline(chart));
    Some(Section { title: "A step under the chip's roofline".into(), lead, chart, ..Section::default() })
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |c| c.to_uppercase().chain(letters).collect())
}

fn times(s: &Judged) -> Option<Section> {
    let programs = of_step(s);
    let parts = |p: &Judgement| {
        let work = p.work.as_ref()?;
        let n = p.launches_in_last_step as f64;
        let links = work.ici_s.filter(|s| *s > 0.0).map(|s| ("c5", n * s));
        Some([Some(("c1", n * work.mxu_s?)), Some(("c3", n * work.hbm_s?)), links])
    };
    let known = || programs.iter().filter_map(|p| parts(p)).flatten().flatten();
    let most = known().map(|(_, x)| x).fold(0.0, f64::max);
    let links = known().any(|(class, _)| class == "c5");
    let rows: Vec<BarRow> = programs
        .iter()
        .take(DRAWN)
        .filter_map(|p| {
            let launches = p.launches_in_last_step;
            let label = if launches > 1 { format!("{} ({launches} times)", p.name) } else { p.name.clone() };
            let share = |x: f64| if most > 0.0 { 100.0 * x / most } else { 0.0 };
            let bars = parts(p)?.into_iter().flatten().map(|(class, x)| (class, share(x), time(x)));
            Some(BarRow { label, bars: bars.collect() })
        })
        .collect();
    if rows.is_empty() {
        return None;
    }
    let mut legend =
        vec![(if s.platform == "cuda" { "products" } else { "matrix unit" }, "c1"), ("memory", "c3")];
    legend.extend(links.then_some(("links between chips", "c5")));
    let lead =
        "For each program of the step what each unit of the chip needs at its peak; the longest counts.";
    let chart = Some(Chart::Bars(Bars { legend, rows }));
    Some(Section {
        title: "Where the time of a step goes".into(),
        lead: lead.into(),
        chart,
        ..Section::default()
    })
}

fn programs(s: &Judged) -> Option<Section> {
    if s.programs.is_empty() {
        return None;
    }
    let rows = s.programs.iter().map(|p| {
        let or_dash = |x: Option<String>| Cell::number(x.unwrap_or_else(|| "-".to_owned()));
        let least = p.work.as_ref().and_then(|w| w.roofline_s).map(time);
        let verdict = Cell {
            class: tone(p.verdict),
            title: p.error.clone().unwrap_or_default(),
            ..Cell::text(mark(p.verdict).0)
        };
        let name = Cell { title: p.id.clone(), ..Cell::code(p.name.clone()) };
        let why = p.why.as_ref().map(|w| Cell {
            title: w.differences.iter().chain(&w.hint).cloned().collect::<Vec<_>>().join("\n"),
            ..Cell::text(notes::why_new(w))
        });
        let number = p.why.as_ref().map_or_else(String::new, |w| w.number.to_string());
        vec![
            Cell::number(number),
            verdict,
            name,
            Cell::line(p.first_line.as_deref()),
            Cell::number(p.ops.to_string()),
            Cell::number(p.launches_in_last_step.to_string()),
            or_dash(p.need_bytes.map(bytes)),
            or_dash(least),
            why.unwrap_or_default(),
        ]
    });
    let head = [
        "#",
        "",
        "program",
        "begins at",
        "ops#",
        "in a step#",
        "memory#",
        "at least#",
        "why it is a program of its own",
    ];
    let step = s.step.as_ref().map_or_else(String::new, |t| {
        let (n, launches) =
            (many(t.programs, "program"), many(t.launches, "launch").replace("launchs", "launches"));
        format!(" The last step makes {launches} of {n}.")
    });
    let lead = format!(
        "{} in {} of the script.{step} Each new program costs a compilation.",
        capital(&many(s.programs.len() as u64, "program")),
        many(s.steps_captured, "step")
    );
    Some(Section {
        title: "Programs".into(),
        lead,
        table: Some(Table::new(&head, rows)),
        ..Section::default()
    })
}

fn waits(s: &Judged) -> Option<Section> {
    if s.programs.is_empty() {
        return None;
    }
    let reads: u64 = s.host_reads.iter().map(|m| m.count).sum();
    let row = |what: &'static str| {
        move |m: &Moved| {
            let count = Cell::number(m.count.to_string());
            vec![Cell::text(what), count, Cell::number(bytes(m.bytes)), Cell::line(m.line.as_deref())]
        }
    };
    let rows: Vec<_> =
        s.host_reads.iter().map(row("read")).chain(s.host_writes.iter().map(row("written"))).collect();
    let lead = match reads {
        0 => "The host reads nothing from the device in a step, so it never waits.".to_owned(),
        n => {
            format!("{} in a step: the host waits for the device each time.", capital(&many(n, "host read")))
        }
    };
    let table = (!rows.is_empty()).then(|| Table::new(&["", "times#", "bytes#", "line"], rows));
    Some(Section { title: "Between host and device".into(), lead, table, ..Section::default() })
}

fn fallbacks(s: &Judged) -> Option<Section> {
    if s.fallbacks.is_empty() {
        return None;
    }
    let rows = s.fallbacks.iter().map(|f| {
        vec![
            Cell::code(f.op.clone()),
            Cell::number(f.step.to_string()),
            Cell::number(f.count.to_string()),
            Cell::line(f.line.as_deref()),
        ]
    });
    let lead = "These have no lowering: their operands go to the host and their results back.".to_owned();
    let table = Some(Table::new(&["operation", "step#", "times#", "line"], rows));
    Some(Section { title: "Operations that ran on the CPU".into(), lead, table, ..Section::default() })
}

fn padding(s: &Judged) -> Option<Section> {
    let padding = s.padding.as_ref().filter(|p| !p.products.is_empty())?;
    let rows = padding.products.iter().map(|p| {
        let sizes = format!("{} x ({} x {} x {})", p.batch * p.count, p.m, p.k, p.n);
        vec![
            Cell::number(format!("{:.2} %", 100.0 * p.useful)).filled(p.useful),
            Cell::line(p.line.as_deref()),
            Cell::code(p.op.clone().unwrap_or_default()),
            Cell::fixed(sizes),
            Cell::fixed(p.dtype),
            Cell::text(p.advice.clone()),
        ]
    });
    let lead = format!(
        "About {:.0} % of the matrix unit's work is padding to its {} x {}; with it the products take {}.",
        100.0 * padding.share,
        padding.unit,
        padding.unit,
        time(padding.mxu_s)
    );
    let head = ["useful#", "line", "operation", "products of m x k by k x n", "", "advice"];
    let table = Some(Table::new(&head, rows));
    Some(Section { title: "Padding in the matrix unit".into(), lead, table, ..Section::default() })
}

fn tiles(s: &Judged) -> Option<Section> {
    let padding =
        s.padding.as_ref().filter(|p| p.tensor_padded_bytes as f64 > 1.01 * p.tensor_bytes as f64)?;
    let rows = padding.tensors.iter().map(|t| {
        let own = t.bytes as f64 / t.padded_bytes.max(1) as f64;
        vec![
            Cell::number(bytes(t.padded_bytes - t.bytes)),
            Cell::number(format!("{} of {}", bytes(t.bytes), bytes(t.padded_bytes))).filled(own),
            Cell::fixed(t.r#type.to_string()),
            Cell::text(t.role),
            Cell::line(t.line.as_deref()),
        ]
    });
    let lead = format!(
        "Arrays lie in tiles of 8 x 128 elements: arguments and outputs of {} take {}. The memory above has that in it.",
        bytes(padding.tensor_bytes),
        bytes(padding.tensor_padded_bytes)
    );
    let table = Some(Table::new(&["wasted#", "used#", "tensor", "", "made by"], rows));
    Some(Section { title: "Padding in memory".into(), lead, table, ..Section::default() })
}

fn undonated(s: &Judged) -> Option<Section> {
    let all: Vec<_> = s.programs.iter().flat_map(|p| p.undonated.iter().map(move |u| (p, u))).collect();
    if all.is_empty() {
        return None;
    }
    let sum: u64 = all.iter().map(|(_, u)| u.bytes).sum();
    // Those that are alike are one row.
    let mut alike: Vec<(&Judgement, &Undonated, u64)> = Vec::new();
    for (p, u) in &all {
        let same = |o: &&mut (&Judgement, &Undonated, u64)| {
            o.0.id == p.id && (&o.1.r#type, &o.1.line, &o.1.reason) == (&u.r#type, &u.line, &u.reason)
        };
        match alike.iter_mut().find(same) {
            Some((_, _, n)) => *n += 1,
            None => alike.push((p, u, 1)),
        }
    }
    alike.sort_by_key(|(_, u, n)| std::cmp::Reverse(u.bytes * n));
    let rows = alike.iter().map(|(p, u, n)| {
        vec![
            Cell::number(bytes(u.bytes * n)),
            Cell::number(n.to_string()),
            Cell::fixed(u.r#type.to_string()),
            Cell::line(u.line.as_deref()),
            Cell::code(p.name.clone()),
            Cell::text(notes::why(u)),
        ]
    });
    let lead = format!(
        "{} of {} that nobody uses again: no result gets their memory.",
        capital(&many(all.len() as u64, "argument")),
        bytes(sum)
    );
    let table = Some(Table::new(&["together#", "number#", "tensor", "made by", "program", "why"], rows));
    Some(Section { title: "What could have been overwritten".into(), lead, table, ..Section::default() })
}
