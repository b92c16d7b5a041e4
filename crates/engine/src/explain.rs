//! Why a program is a new one: what differs from the program before that is most like it, and what to do about it.

use crate::flush::Reason;
use crate::inst::{Inst, Kind};
use crate::program::{Compiler, Graph, Program};
use crate::site::{Site, describe};
use oxitorch_aten::{Arg, dtype::torch_name};
use oxitorch_hlo::TensorType;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Programs that new ones are compared with.
const COMPARED: usize = 256;
/// Explanations that are kept.
const KEPT: usize = 1000;
/// Differing ops that an explanation names.
const NAMED: usize = 3;

/// A program as it is compared.
struct Known {
    number: u64,
    insts: Vec<&'static Inst>,
    sites: Vec<Site>,
    live: Vec<u32>,
    donated: usize,
    options: u32,
}

/// The programs of a process and why each was made.
#[derive(Default)]
pub(crate) struct Explainer {
    known: Mutex<VecDeque<Known>>,
    texts: Mutex<VecDeque<(String, Arc<Program>)>>,
    programs: AtomicU64,
    /// New programs are an error from this number on; 0: never.
    limit: AtomicU64,
    prints: AtomicBool,
}

impl Explainer {
    /// Whether explanations are printed as they come.
    pub(crate) fn print(&self, on: bool) {
        self.prints.store(on, Relaxed);
    }

    /// Allows so many programs from now on; `None`: any number. Gives what was left of the bound before.
    pub(crate) fn allow(&self, more: Option<u64>) -> Option<u64> {
        let made = self.programs.load(Relaxed);
        let before = self.limit.swap(more.map_or(0, |n| made + n + 1), Relaxed);
        before.checked_sub(made + 1)
    }

    /// The explanations so far, oldest first, with what the cache folder has instead.
    pub(crate) fn texts(&self, compiler: &Compiler) -> Vec<String> {
        let texts: Vec<_> = self.texts.lock().iter().cloned().collect();
        let stored = compiler.stored();
        let whole = |(text, program): (String, Arc<Program>)| match compiler.missed(&program, &stored) {
            Some(missed) => format!("{text}\n  {missed}"),
            None => text,
        };
        texts.into_iter().map(whole).collect()
    }

    /// Notes a new program; the text is an error if it is one too many.
    pub(crate) fn explain(
        &self,
        graph: &Graph,
        program: &Arc<Program>,
        sites: &[Site],
        cut: (Reason, Site),
    ) -> Result<(), String> {
        let number = self.programs.fetch_add(1, Relaxed) + 1;
        let new = Known {
            number,
            insts: graph.insts.clone(),
            sites: sites.to_vec(),
            live: graph.live.to_vec(),
            donated: graph.donated.len(),
            options: graph.options,
        };
        let mut known = self.known.lock();
        let mut text = format!("program {number}: {}, {}", count(new.insts.len(), "op"), program.name);
        // Writing to a String does not fail.
        let _ = write!(text, "\n  {}", launched(cut));
        match nearest(&known, &new) {
            Some(old) => compare(old, &new, &mut text),
            None if known.is_empty() => text.push_str("\n  the first program"),
            None => text.push_str("\n  no program before is like it: these lines run for the first time"),
        }
        known.push_back(new);
        if known.len() > COMPARED {
            known.pop_front();
        }
        drop(known);
        let mut texts = self.texts.lock();
        texts.push_back((text.clone(), program.clone()));
        if texts.len() > KEPT {
            texts.pop_front();
        }
        drop(texts);
        if self.prints.load(Relaxed) {
            eprintln!("oxitorch: {text}");
        }
        let limit = self.limit.load(Relaxed);
        if limit == 0 || number < limit { Ok(()) } else { Err(text) }
    }
}

fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

fn line(site: Site) -> String {
    describe(site).unwrap_or_else(|| "an unknown line".to_owned())
}

/// Why and where it was launched.
fn launched((reason, site): (Reason, Site)) -> String {
    let why = match reason {
        Reason::Mode => "launched at once, as the eager mode asks",
        Reason::Read => "launched because a value was read",
        Reason::Wait => "launched because something waited for the device",
        Reason::Step => "launched because an optimizer made its step",
        Reason::Loop => "launched because a loop came round",
        Reason::Ops => "launched because the window had as many ops as may be (torch.tpu.set_window)",
        Reason::Bytes => "launched because the window had as many bytes as may be (torch.tpu.set_window)",
        Reason::Options => "launched because other compiler options came into force",
        Reason::Barrier => "launched because of a barrier",
    };
    match describe(site) {
        Some(line) => format!("{why}, at {line}"),
        None => why.to_owned(),
    }
}

/// How two programs lie beside each other: ops of the same names at the start and at the end.
struct Alignment {
    start: usize,
    end: usize,
}

impl Alignment {
    fn of(old: &Known, new: &Known) -> Alignment {
        let same = |(a, b): &(&&Inst, &&Inst)| a.name() == b.name();
        let start = old.insts.iter().zip(&new.insts).take_while(same).count();
        let rest = old.insts.len().min(new.insts.len()) - start;
        let end = old.insts.iter().rev().zip(new.insts.iter().rev()).take(rest).take_while(same).count();
        Alignment { start, end }
    }

    /// Positions of ops that stand for each other.
    fn pairs(&self, old: &Known, new: &Known) -> impl Iterator<Item = (usize, usize)> {
        let (old, new) = (old.insts.len() - self.end, new.insts.len() - self.end);
        (0..self.start).map(|i| (i, i)).chain((0..self.end).map(move |i| (old + i, new + i)))
    }
}

/// The known program that has most in common, if that is half of it.
fn nearest<'k>(known: &'k VecDeque<Known>, new: &Known) -> Option<&'k Known> {
    let likeness = |old: &Known| {
        let aligned = Alignment::of(old, new);
        let pairs = aligned.pairs(old, new);
        let points: usize = pairs.map(|(a, b)| 3 + usize::from(old.insts[a].id == new.insts[b].id)).sum();
        // Of two alike, the one that began at the same line.
        points + usize::from(old.sites.first() == new.sites.first())
    };
    let (points, best) = known.iter().map(|old| (likeness(old), old)).max_by_key(|(points, _)| *points)?;
    (points >= 2 * new.insts.len().min(best.insts.len())).then_some(best)
}

fn compare(old: &Known, new: &Known, text: &mut String) {
    let _ = write!(text, "\n  nearest: program {}, {}", old.number, count(old.insts.len(), "op"));
    let aligned = Alignment::of(old, new);
    let differing: Vec<(usize, usize)> =
        aligned.pairs(old, new).filter(|&(a, b)| old.insts[a].id != new.insts[b].id).collect();
    let mut advice = Advice::default();
    for &(a, b) in differing.iter().take(NAMED) {
        let what = difference(old.insts[a], new.insts[b], &mut advice);
        let _ = write!(text, "\n  op {} {} at {}: {what}", b + 1, new.insts[b].name(), line(new.sites[b]));
    }
    if differing.len() > NAMED {
        let _ = write!(text, "\n  and {}", count(differing.len() - NAMED, "more op"));
    }
    let between = |k: &Known| aligned.start..k.insts.len() - aligned.end;
    let (gone, come) = (between(old), between(new));
    if !gone.is_empty() || !come.is_empty() {
        if aligned.end == 0 && (gone.is_empty() || come.is_empty()) {
            let (which, long) = if come.is_empty() { ("this one", old) } else { ("the old one", new) };
            let _ = write!(text, "\n  {which} ends before {}", op_at(long, aligned.start));
            advice.note(Advice::CUT);
        } else {
            for (what, k, ops) in [("come in", new, come), ("are gone", old, gone)] {
                if !ops.is_empty() {
                    let n = count(ops.len(), "op");
                    let _ = write!(text, "\n  {n} {what}, the first is {}", op_at(k, ops.start));
                }
            }
            advice.note(Advice::OTHER_OP);
        }
    } else if differing.is_empty() {
        visible(old, new, text, &mut advice);
    }
    if old.options != new.options {
        text.push_str("\n  the compiler options differ");
    }
    if let Some(hint) = advice.0 {
        let _ = write!(text, "\n  hint: {hint}");
    }
}

fn op_at(k: &Known, i: usize) -> String {
    format!("{} at {}", k.insts[i].name(), line(k.sites[i]))
}

/// What the same ops leave behind.
fn visible(old: &Known, new: &Known, text: &mut String, advice: &mut Advice) {
    let owner = |k: &Known, result: u32| {
        let mut first = 0;
        let at = k.insts.iter().position(|inst| {
            first += inst.outputs.len() as u32;
            result < first
        });
        at.map_or_else(|| "an op".to_owned(), |i| op_at(k, i))
    };
    let only = |a: &Known, b: &Known| a.live.iter().copied().find(|r| !b.live.contains(r));
    if let Some(r) = only(new, old) {
        let _ = write!(text, "\n  the result of {} can still be seen, then it could not", owner(new, r));
        advice.note(Advice::VISIBLE);
    } else if let Some(r) = only(old, new) {
        let _ = write!(text, "\n  the result of {} can not be seen any more, then it could", owner(old, r));
        advice.note(Advice::VISIBLE);
    } else if old.donated != new.donated {
        let _ = write!(
            text,
            "\n  {} can be overwritten, then it was {}",
            count(new.donated, "input"),
            old.donated
        );
        advice.note(Advice::VISIBLE);
    } else if old.options == new.options {
        text.push_str("\n  the same ops on other operands");
    }
}

/// What to do about the first difference.
#[derive(Default)]
struct Advice(Option<&'static str>);

impl Advice {
    const SIZE: &'static str =
        "a size changed: for a short last batch use drop_last=True, else pad to a few fixed sizes";
    const DTYPE: &'static str = "a dtype changed: convert where the data comes in, or check autocast";
    const ATTRIBUTE: &'static str = "the argument shapes the program, so each value is a program of its own: keep it fixed, or pass a tensor";
    const OTHER_OP: &'static str = "the code took another way; both stay compiled";
    const CUT: &'static str = "reads and waits cut the stream: do them at the same place in every round";
    const VISIBLE: &'static str =
        "a variable keeps a value of another round alive, or no longer does; this settles after a round";

    fn note(&mut self, hint: &'static str) {
        self.0.get_or_insert(hint);
    }
}

/// What differs between two instances.
fn difference(old: &Inst, new: &Inst, advice: &mut Advice) -> String {
    let mut tensors = |a: &TensorType, b: &TensorType| {
        advice.note(if a.dtype == b.dtype { Advice::SIZE } else { Advice::DTYPE });
        format!("{}, was {}", tensor(b), tensor(a))
    };
    if let (
        Kind::Row { args: a, dests: da, lowering: la, .. },
        Kind::Row { args: b, dests: db, lowering: lb, .. },
    ) = (&old.kind, &new.kind)
    {
        if let Some((i, (a, b))) = a.iter().zip(b).enumerate().find(|(_, (a, b))| a != b) {
            let place = format!("argument {}", i + 1);
            return match (a, b) {
                (Arg::Tensor(a), Arg::Tensor(b)) if a.ty != b.ty => {
                    format!("{place} is {}", tensors(&a.ty, &b.ty))
                }
                (Arg::Tensor(a), Arg::Tensor(b)) if a.strides != b.strides => {
                    format!("{place} has strides {:?}, had {:?}", b.strides.as_slice(), a.strides.as_slice())
                }
                (Arg::Tensors(a), Arg::Tensors(b)) => {
                    let both = a.iter().flatten().zip(b.iter().flatten()).find(|(a, b)| a.ty != b.ty);
                    match both {
                        Some((a, b)) => format!("{place} holds {}", tensors(&a.ty, &b.ty)),
                        None => format!("{place} holds {}, held {}", count(b.len(), "tensor"), a.len()),
                    }
                }
                (Arg::Scalar(a), Arg::Scalar(b)) if a.kind != b.kind => {
                    advice.note(Advice::DTYPE);
                    format!("{place} is a Python {:?}, was {:?}", b.kind, a.kind).to_lowercase()
                }
                (a, b) => {
                    advice.note(Advice::ATTRIBUTE);
                    format!("{place} is {}, was {}", shown(b), shown(a))
                }
            };
        }
        if la != lb {
            return "the eager mode, the default dtype or the precision of products differs".to_owned();
        }
        if da != db {
            return "its result goes to a tensor of another dtype or size".to_owned();
        }
    }
    match old.operands.iter().zip(&new.operands).find(|(a, b)| a != b) {
        Some((a, b)) => format!("it works on {}", tensors(a, b)),
        None => {
            advice.note(Advice::SIZE);
            "another view of its operand".to_owned()
        }
    }
}

/// A type as torch would say it, for instance `float32[2, 3]`.
pub(crate) fn tensor(ty: &TensorType) -> String {
    format!("{}{:?}", torch_name(ty.dtype).trim_start_matches("torch."), ty.shape.as_slice())
}

/// An argument as its user wrote it.
fn shown(arg: &Arg) -> String {
    match arg {
        Arg::None => "left out".to_owned(),
        Arg::Tensor(t) => tensor(&t.ty),
        Arg::Tensors(l) => count(l.len(), "tensor"),
        Arg::Scalar(s) => format!("a Python {:?}", s.kind).to_lowercase(),
        Arg::Int(x) => x.to_string(),
        Arg::Float(x) => x.get().to_string(),
        Arg::Bool(x) => if *x { "True" } else { "False" }.to_owned(),
        Arg::Complex(re, im) => format!("({}{:+}j)", re.get(), im.get()),
        Arg::Ints(v) => format!("{:?}", v.as_slice()),
        Arg::Floats(v) => format!("{v:?}"),
        Arg::Bools(v) => format!("{v:?}"),
        Arg::Str(s) => format!("'{s}'"),
        Arg::Rng(_) => "a generator".to_owned(),
    }
}
