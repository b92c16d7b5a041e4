//! Why a program is a new one: what differs from the program before that is most like it, and what to do about it.

use crate::ending::Ended;
use crate::graph::{Given, Graph};
use crate::inst::{Inst, Kind};
use crate::program::{Compiler, Program};
use crate::shared::Shared;
use crate::site::{Site, describe};
use oxitorch_aten::Arg;
use oxitorch_capture::Reason;
use oxitorch_capture::{Cause, Why};
use oxitorch_hlo::TensorType;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::fmt::{self, Display};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::ThreadId;

/// Differing ops that an explanation names.
const NAMED: usize = 3;

/// A program as it is compared.
struct Known {
    number: u64,
    insts: Vec<Shared<Inst>>,
    sites: Vec<Site>,
    /// The lines of its ops: a site is a whole stack, and so another one at each depth of a recursion.
    lines: Vec<u32>,
    live: Vec<u32>,
    donated: usize,
    /// Offsets that it is given.
    given: Box<[Given]>,
    options: u32,
}

/// How much is remembered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Programs that new ones are compared with.
    compared: usize,
    /// Explanations.
    kept: usize,
}

impl Bounds {
    /// Where programs run.
    pub(crate) const RUNNING: Bounds = Bounds { compared: 256, kept: 1000 };
    /// Where they are captured to be looked at: each has its explanation.
    pub(crate) const CAPTURING: Bounds = Bounds { compared: 4096, kept: usize::MAX };
}

/// Why a program is a new one.
#[derive(Clone, Debug)]
pub(crate) struct Explanation {
    /// Programs are counted from 1.
    number: u64,
    ops: usize,
    name: String,
    /// Why and where it was launched.
    launched: String,
    /// The number of the program that is most like it, and its ops.
    nearest: Option<(u64, usize)>,
    /// What differs, a line each.
    differences: Vec<String>,
    cause: Cause,
}

/// Something that was said, and the program that it is of.
#[derive(Clone)]
enum Entry {
    Program(Explanation, Arc<Program>),
    /// A loop or branch that is no part of a program.
    Played(String),
}

/// Numbers of lines.
#[derive(Default)]
struct Lines {
    of: FxHashMap<Site, u32>,
    by_text: FxHashMap<Option<String>, u32>,
}

impl Lines {
    /// Sites that are remembered.
    const MOST: usize = 1 << 16;

    fn of(&mut self, site: Site) -> u32 {
        if self.of.len() >= Lines::MOST {
            *self = Lines::default(); // programs before this one are like no other then
        }
        let Lines { of, by_text } = self;
        *of.entry(site).or_insert_with(|| {
            let new = by_text.len() as u32;
            *by_text.entry(describe(site)).or_insert(new)
        })
    }
}

/// The programs of a process and why each was made.
pub(crate) struct Explainer {
    bounds: Bounds,
    lines: Mutex<Lines>,
    known: Mutex<VecDeque<Known>>,
    explanations: Mutex<VecDeque<Entry>>,
    programs: AtomicU64,
    /// New programs are an error from this number on; 0: never.
    limit: AtomicU64,
    prints: AtomicBool,
    /// What is to be said of the next program of a thread.
    remarks: Mutex<Vec<(ThreadId, String)>>,
    /// What is to be said of all programs of a thread, outermost first.
    within: Mutex<Vec<(ThreadId, String)>>,
}

impl Explainer {
    /// Without programs.
    pub(crate) fn new(bounds: Bounds) -> Explainer {
        Explainer {
            bounds,
            lines: Mutex::default(),
            known: Mutex::default(),
            explanations: Mutex::default(),
            programs: AtomicU64::new(0),
            limit: AtomicU64::new(0),
            prints: AtomicBool::new(false),
            remarks: Mutex::default(),
            within: Mutex::default(),
        }
    }

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
        let explanations: Vec<_> = self.explanations.lock().iter().cloned().collect();
        let stored = compiler.stored();
        let whole = |entry: Entry| match entry {
            Entry::Played(text) => text,
            Entry::Program(explanation, program) => match compiler.missed(&program, stored) {
                Some(missed) => format!("{explanation}\n  {missed}"),
                None => explanation.to_string(),
            },
        };
        explanations.into_iter().map(whole).collect()
    }

    /// Why this program was made.
    pub(crate) fn of(&self, program: &Arc<Program>) -> Option<Why> {
        let explanations = self.explanations.lock();
        explanations.iter().find_map(|entry| match entry {
            Entry::Program(e, p) if Arc::ptr_eq(p, program) => Some(e.why()),
            _ => None,
        })
    }

    /// Notes, once, that the rounds of a loop, or a branch, are recorded one by one.
    pub(crate) fn played(&self, name: &str, site: Site, why: &str) {
        let text =
            format!("{name} at {}: not one operation of a program, as its body needs {why}", line(site));
        let mut explanations = self.explanations.lock();
        if explanations.iter().any(|entry| matches!(entry, Entry::Played(known) if *known == text)) {
            return;
        }
        if self.prints.load(Relaxed) {
            eprintln!("oxitorch: {text}");
        }
        self.keep(&mut explanations, Entry::Played(text));
    }

    fn keep(&self, explanations: &mut VecDeque<Entry>, entry: Entry) {
        explanations.push_back(entry);
        if explanations.len() > self.bounds.kept {
            explanations.pop_front();
        }
    }

    /// Says something of the next program of this thread.
    pub(crate) fn remark(&self, text: String) {
        let mut remarks = self.remarks.lock();
        remarks.retain(|(thread, _)| *thread != std::thread::current().id());
        remarks.push((std::thread::current().id(), text));
    }

    /// Says something of all programs of this thread until [`Explainer::leave`].
    pub(crate) fn enter(&self, text: String) {
        self.within.lock().push((std::thread::current().id(), text));
    }

    /// Ends what this thread said last.
    pub(crate) fn leave(&self) {
        let mut within = self.within.lock();
        let last = within.iter().rposition(|(thread, _)| *thread == std::thread::current().id());
        last.map(|at| within.remove(at));
    }

    /// Notes a new program; the text is an error if it is one too many.
    pub(crate) fn explain(&self, graph: &Graph, program: &Arc<Program>) -> Result<(), String> {
        let number = self.programs.fetch_add(1, Relaxed) + 1;
        let mut lines = self.lines.lock();
        let new = Known {
            number,
            insts: graph.ops.insts.clone(),
            sites: graph.ops.sites.clone(),
            lines: graph.ops.sites.iter().map(|&site| lines.of(site)).collect(),
            live: graph.live.to_vec(),
            donated: graph.donated.len(),
            given: graph.given.clone(),
            options: graph.options,
        };
        drop(lines);
        let mut known = self.known.lock();
        let mut explanation = Explanation {
            number,
            ops: new.insts.len(),
            name: program.name.clone(),
            launched: graph.source.ended.as_ref().map(launched).unwrap_or_default(),
            nearest: None,
            differences: Vec::new(),
            cause: if known.is_empty() { Cause::First } else { Cause::NewLines },
        };
        if let Some(old) = nearest(&known, &new) {
            compare(old, &new, &mut explanation);
        }
        if graph.sample.is_some() && matches!(explanation.cause, Cause::Size | Cause::Attribute) {
            explanation.cause = Cause::Other; // it is for more of them than one
        }
        let here = std::thread::current().id();
        let within = self.within.lock().clone();
        explanation.differences.extend(within.into_iter().filter(|(t, _)| *t == here).map(|(_, text)| text));
        let mut remarks = self.remarks.lock();
        if let Some(at) = remarks.iter().position(|(thread, _)| *thread == here) {
            explanation.differences.push(remarks.swap_remove(at).1);
        }
        drop(remarks);
        known.push_back(new);
        if known.len() > self.bounds.compared {
            known.pop_front();
        }
        drop(known);
        if self.prints.load(Relaxed) {
            eprintln!("oxitorch: {explanation}");
        }
        let limit = self.limit.load(Relaxed);
        let allowed = if limit == 0 || number < limit { Ok(()) } else { Err(explanation.to_string()) };
        self.keep(&mut self.explanations.lock(), Entry::Program(explanation, program.clone()));
        allowed
    }
}

impl Explanation {
    fn why(&self) -> Why {
        Why {
            number: self.number,
            launched: self.launched.clone(),
            nearest: self.nearest.map(|(number, _)| number),
            cause: self.cause,
            differences: self.differences.clone(),
            hint: hint(self.cause).map(str::to_owned),
        }
    }

    /// Notes the first cause.
    fn note(&mut self, cause: Cause) {
        if self.cause == Cause::Other {
            self.cause = cause;
        }
    }
}

impl Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "program {}: {}, {}\n  {}", self.number, count(self.ops, "op"), self.name, self.launched)?;
        match self.nearest {
            Some((number, ops)) => write!(f, "\n  nearest: program {number}, {}", count(ops, "op"))?,
            None if self.cause == Cause::First => f.write_str("\n  the first program")?,
            None => f.write_str("\n  no program before is like it: these lines run for the first time")?,
        }
        self.differences.iter().try_for_each(|d| write!(f, "\n  {d}"))?;
        hint(self.cause).map_or(Ok(()), |hint| write!(f, "\n  hint: {hint}"))
    }
}

/// What to do about it.
fn hint(cause: Cause) -> Option<&'static str> {
    Some(match cause {
        Cause::Size => {
            "a size changed: for a short last batch use drop_last=True, else pad to a few fixed sizes (torch.tpu.bucketing), or use torch.tpu.jit(dynamic=)"
        }
        Cause::Dtype => "a dtype changed: convert where the data comes in, or check autocast",
        Cause::Attribute => {
            "the argument shapes the program, so each value is a program of its own: keep it fixed, or pass a tensor"
        }
        Cause::Ops => "the code took another way; both stay compiled",
        Cause::Rounds => {
            "a loop or recursion in Python is as many ops as it has rounds: keep their number fixed, or make it one op (vmap; scan or while_loop of torch._higher_order_ops)"
        }
        Cause::Cut => "reads and waits cut the stream: do them at the same place in every round",
        Cause::Visible => {
            "a variable keeps a value of another round alive, or no longer does; this settles after a round"
        }
        Cause::Offsets => "nothing: this program serves all other values of those offsets",
        Cause::First | Cause::NewLines | Cause::Options | Cause::Other => return None,
    })
}

fn count(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

fn line(site: Site) -> String {
    describe(site).unwrap_or_else(|| "an unknown line".to_owned())
}

/// Why and where it was launched.
fn launched(ended: &Ended) -> String {
    let why = match ended.reason {
        Reason::Mode => "launched at once, as the eager mode asks",
        Reason::Read => "launched because a value was read",
        Reason::Wait => "launched because something waited for the device",
        Reason::Step => "launched because an optimizer made its step",
        Reason::Loop => "launched because a loop came round",
        Reason::Ops => "launched because the window had as many ops as may be (torch.tpu.set_window)",
        Reason::Bytes => "launched because the window had as many bytes as may be (torch.tpu.set_window)",
        Reason::Options => "launched because other compiler options came into force",
        Reason::Barrier => "launched because of a barrier",
        Reason::Recompute => "launched because a backward computed something again",
        Reason::Part => "a part of a window that has no program as a whole",
        Reason::Collective => "launched because of a collective",
        Reason::Jit => {
            "launched because of a call that is one program (torch.tpu.jit, or torch.compile where sizes vary)"
        }
    };
    let which = ended.collective.as_ref().map_or(String::new(), |which| format!(": {which}"));
    let at = describe(ended.site).map_or(String::new(), |line| format!(", at {line}"));
    format!("{why}{which}{at}")
}

/// How two programs lie beside each other: ops of the same names at the start and at the end.
struct Alignment {
    start: usize,
    end: usize,
}

impl Alignment {
    fn of(old: &Known, new: &Known) -> Alignment {
        let same = |(a, b): &(&Shared<Inst>, &Shared<Inst>)| a.name() == b.name();
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

/// How often each op of a line is in a program.
fn rounds(k: &Known) -> FxHashMap<(&'static str, u32), usize> {
    let mut rounds = FxHashMap::default();
    for (inst, &line) in k.insts.iter().zip(&k.lines) {
        *rounds.entry((inst.name(), line)).or_default() += 1;
    }
    rounds
}

/// The known program of the same lines of which as many ops as possible are there as often: what a recursion records lies in
/// another order at each depth.
fn of_same_lines<'k>(known: &'k VecDeque<Known>, new: &Known) -> Option<&'k Known> {
    let own = rounds(new);
    let near = |old: &'k Known| {
        let before = rounds(old);
        let is_same = own.len() == before.len() && own.keys().all(|op| before.contains_key(op));
        let apart = || own.iter().map(|(op, n)| n.abs_diff(before[op])).sum::<usize>();
        is_same.then(|| (apart(), old))
    };
    known.iter().rev().filter_map(near).min_by_key(|(apart, _)| *apart).map(|(_, old)| old)
}

/// The known program that has most in common, if that is half of it; else one of the same lines.
fn nearest<'k>(known: &'k VecDeque<Known>, new: &Known) -> Option<&'k Known> {
    let likeness = |old: &Known| {
        let aligned = Alignment::of(old, new);
        let pairs = aligned.pairs(old, new);
        let points: usize = pairs.map(|(a, b)| 3 + usize::from(old.insts[a].id == new.insts[b].id)).sum();
        // Of two alike, the one that began at the same line.
        points + usize::from(old.sites.first() == new.sites.first())
    };
    let (points, best) = known.iter().map(|old| (likeness(old), old)).max_by_key(|(points, _)| *points)?;
    let is_alike = points >= 2 * new.insts.len().min(best.insts.len());
    if is_alike { Some(best) } else { of_same_lines(known, new) }
}

fn compare(old: &Known, new: &Known, e: &mut Explanation) {
    e.nearest = Some((old.number, old.insts.len()));
    e.cause = Cause::Other;
    let aligned = Alignment::of(old, new);
    let differing: Vec<(usize, usize)> =
        aligned.pairs(old, new).filter(|&(a, b)| old.insts[a].id != new.insts[b].id).collect();
    for &(a, b) in differing.iter().take(NAMED) {
        let what = difference(&old.insts[a], &new.insts[b], e);
        e.differences.push(format!("op {} {} at {}: {what}", b + 1, new.insts[b].name(), line(new.sites[b])));
    }
    if differing.len() > NAMED {
        e.differences.push(format!("and {}", count(differing.len() - NAMED, "more op")));
    }
    let between = |k: &Known| aligned.start..k.insts.len() - aligned.end;
    let (gone, come) = (between(old), between(new));
    if !gone.is_empty() || !come.is_empty() {
        if let Some(text) = other_rounds(old, new) {
            e.differences.push(text);
            e.cause = Cause::Rounds; // the sizes of a recursion follow from its depth
        } else if aligned.end == 0 && (gone.is_empty() || come.is_empty()) {
            let (which, long) = if come.is_empty() { ("this one", old) } else { ("the old one", new) };
            e.differences.push(format!("{which} ends before {}", op_at(long, aligned.start)));
            e.note(Cause::Cut);
        } else {
            for (what, k, ops) in [(("comes in", "come in"), new, come), (("is gone", "are gone"), old, gone)]
            {
                if !ops.is_empty() {
                    let what = if ops.len() == 1 { what.0 } else { what.1 };
                    let n = count(ops.len(), "op");
                    e.differences.push(format!("{n} {what}, the first is {}", op_at(k, ops.start)));
                }
            }
            e.note(Cause::Ops);
        }
    } else if differing.is_empty() && old.given != new.given {
        let text = if old.given.len() == new.given.len() {
            "offsets that had kept their distance are operands of their own from now on".to_owned()
        } else {
            let offsets = count(new.given.len(), "offset");
            format!(
                "{offsets} differ in value and are operands from now on (starts of slices, indices, shifts)"
            )
        };
        e.differences.push(text);
        e.note(Cause::Offsets);
    } else if differing.is_empty() {
        visible(old, new, e);
    }
    if old.options != new.options {
        e.differences.push("the compiler options differ".to_owned());
        e.note(Cause::Options);
    }
}

/// What is said of two programs that differ in how often their lines run.
fn other_rounds(old: &Known, new: &Known) -> Option<String> {
    let (before, own) = (rounds(old), rounds(new));
    if before.len() != own.len() || !own.keys().all(|op| before.contains_key(op)) {
        return None;
    }
    let op = |i: usize| (new.insts[i].name(), new.lines[i]);
    let at = (0..new.insts.len()).max_by_key(|&i| own[&op(i)].abs_diff(before[&op(i)]))?;
    let times = |n: usize| if n == 1 { "once".to_owned() } else { format!("{n} times") };
    let (now, then) = (own[&op(at)], before[&op(at)]);
    (now != then).then(|| format!("{} runs {}, ran {}", op_at(new, at), times(now), times(then)))
}

fn op_at(k: &Known, i: usize) -> String {
    format!("{} at {}", k.insts[i].name(), line(k.sites[i]))
}

/// What the same ops leave behind.
fn visible(old: &Known, new: &Known, e: &mut Explanation) {
    let owner = |k: &Known, result: u32| {
        let mut first = 0;
        let at = k.insts.iter().position(|inst| {
            first += inst.outputs.len() as u32;
            result < first
        });
        at.map_or_else(|| "an op".to_owned(), |i| op_at(k, i))
    };
    let only = |a: &Known, b: &Known| a.live.iter().copied().find(|r| !b.live.contains(r));
    let what = if let Some(r) = only(new, old) {
        format!("the result of {} can still be seen, then it could not", owner(new, r))
    } else if let Some(r) = only(old, new) {
        format!("the result of {} can not be seen any more, then it could", owner(old, r))
    } else if old.donated != new.donated {
        format!("{} can be overwritten, then it was {}", count(new.donated, "input"), old.donated)
    } else {
        if old.options == new.options {
            e.differences.push("the same ops on other operands".to_owned());
        }
        return;
    };
    e.differences.push(what);
    e.note(Cause::Visible);
}

/// What differs between two instances.
fn difference(old: &Inst, new: &Inst, e: &mut Explanation) -> String {
    let mut tensors = |a: &TensorType, b: &TensorType| {
        e.note(if a.dtype == b.dtype { Cause::Size } else { Cause::Dtype });
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
                    e.note(Cause::Dtype);
                    format!("{place} is a Python {:?}, was {:?}", b.kind, a.kind).to_lowercase()
                }
                (a, b) => {
                    e.note(Cause::Attribute);
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
        None => another_view(&old.kind, &new.kind, e),
    }
}

/// What differs between two views of one value.
fn another_view(old: &Kind, new: &Kind, e: &mut Explanation) -> String {
    match (old.shape(), new.shape()) {
        (Some(a), Some(b)) if a.ty() != b.ty() => {
            e.note(if a.ty().dtype == b.ty().dtype { Cause::Size } else { Cause::Dtype });
            format!("its view is {}, was {}", tensor(&b.ty()), tensor(&a.ty()))
        }
        (Some(a), Some(b)) if a.strides() != b.strides() => {
            format!("its view has strides {:?}, had {:?}", b.strides(), a.strides())
        }
        _ => "another view of its operand".to_owned(),
    }
}

/// A type as torch would say it, for instance `float32[2, 3]`.
pub(crate) fn tensor(ty: &TensorType) -> String {
    oxitorch_capture::TensorType::from(ty).to_string()
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
        Arg::Offset(_) => "an offset".to_owned(),
        Arg::Offsets(_, n) => count(*n as usize, "offset"),
    }
}
