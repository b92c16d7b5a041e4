//! Threads that record: what each has in the window, and what of it is launched when one of them reads or waits.
//!
//! Threads share a device and its window, and take turns in it as the scheduler likes. If what one of them does ended the
//! window of all, each interleaving would be a program. So each thread has its own bounds and its own round of a loop, and
//! a window ends for the thread that ends it: its ops are launched with what they need of the others', each thread's
//! as programs of their own, and the rest stays recorded. Only who waits for the device launches all.
//!
//! A thread that runs a backward records it for the thread whose forward that was.

use crate::ending::Ending;
use crate::error::Result;
use crate::ops::PRODUCED;
use crate::part::{Part, Position, Results, grouped, parts};
use crate::site::Site;
use crate::stream::Stream;
use crate::threads::{CROWD, MAX_IDLE, Thread, Turn, Whose, here};
use crate::value::Value;
use crate::window::Window;
use oxitorch_capture::Reason;
use rustc_hash::FxHashMap;
use std::sync::Arc;

impl Window {
    /// How many ops the running thread has in the window.
    pub(crate) fn own_ops(&self) -> usize {
        self.ops.len() - self.others.ops
    }

    /// It is the running thread's turn.
    pub(crate) fn enter(&mut self) {
        if !self.bodies.is_empty() {
            self.enter_body(here().thread);
        }
        let caller = here();
        if self.thread.number != caller.thread {
            self.turn(caller.thread);
        }
        if self.own_ops() == 0 {
            self.thread.options = 0;
        }
        if self.thread.recomputes != caller.recomputes {
            self.thread.recomputes = caller.recomputes;
            let begins = caller.recomputes && self.own_ops() > 0;
            self.thread.recompute_begins = begins;
            self.thread.fence = (begins && self.is_watched()).then(|| self.new_fence());
        }
    }

    #[cold]
    fn turn(&mut self, number: u64) {
        let total = self.ops.len();
        self.thread.ops = self.own_ops();
        let others = &mut self.others;
        if others.threads.len() > MAX_IDLE {
            others.threads.retain(|t| t.ops > 0);
        }
        let known = others.threads.iter().position(|t| t.number == number);
        let next = match known {
            Some(at) => others.threads.swap_remove(at),
            None => Thread { number, ..Thread::default() },
        };
        let before = std::mem::replace(&mut self.thread, next);
        if total > 0 {
            if others.turns.is_empty() {
                others.turns.push(Turn { first: 0, thread: before.number });
            }
            others.turns.pop_if(|t| t.first == total);
            others.turns.push(Turn { first: total, thread: number });
        }
        others.ops = total - self.thread.ops;
        if before.ops > 0 || before.round.is_some() {
            others.threads.push(before);
        }
    }

    /// The Python line of the running thread's first op in the window.
    pub(crate) fn first_site(&self) -> Site {
        self.first_site_of(self.thread.number)
    }

    fn first_site_of(&self, thread: u64) -> Site {
        let first = self.others.turns.iter().find(|t| t.thread == thread).map_or(0, |t| t.first);
        self.ops.sites.get(first).copied().unwrap_or_default()
    }

    /// Whether all threads together have too much in the window.
    pub(crate) fn is_crowded(&self) -> bool {
        let bytes =
            || self.others.threads.iter().fold(self.thread.bytes, |sum, t| sum.saturating_add(t.bytes));
        self.others.ops > 0
            && (self.ops.len() / CROWD >= self.limits.ops || bytes() / CROWD as u64 >= self.limits.bytes)
    }

    /// The thread of each op.
    fn owners(&self) -> Vec<u64> {
        let turns = &self.others.turns;
        let ends = turns.iter().skip(1).map(|t| t.first).chain([self.ops.len()]);
        let mut owners = Vec::with_capacity(self.ops.len());
        turns.iter().zip(ends).for_each(|(turn, end)| owners.resize(end, turn.thread));
        owners
    }

    /// The running thread's round of a loop once all that it recorded is launched: it goes on if a bound is the reason.
    pub(crate) fn round_after(&self, reason: Reason) -> Option<(Site, usize)> {
        let (began, before) = self.thread.round.unwrap_or((self.first_site(), 0));
        let bound = matches!(reason, Reason::Ops | Reason::Bytes);
        // Else the bounds would cut each round of a loop elsewhere, and each cut makes new programs.
        bound.then_some((began, before + self.own_ops()))
    }

    /// Nothing is recorded any more.
    pub(crate) fn clear_threads(&mut self) {
        (self.thread.bytes, self.thread.kept) = (0, 0);
        (self.thread.taken, self.thread.look_at) = (0, 0);
        self.thread.fence = None;
        self.others.turns.clear();
    }

    /// Puts back what stays recorded, and by whom. `began`: the line of each thread's first op before.
    fn put_back(&mut self, stays: Part, produced: Vec<Option<Arc<Value>>>, owners: &[u64], began: &Began) {
        self.ops = stays.ops;
        self.inputs = stays.inputs;
        self.produced = produced;
        self.mark_all();
        self.others.turns.clear();
        let next = self.thread.number;
        for (first, &thread) in owners.iter().chain((!owners.is_empty()).then_some(&next)).enumerate() {
            if self.others.turns.last().is_none_or(|t| t.thread != thread) {
                self.others.turns.push(Turn { first, thread });
            }
        }
        let Window { ops, others, thread: own, .. } = self;
        for thread in others.threads.iter_mut().chain([&mut *own]) {
            let number = thread.number;
            let left = || owners.iter().zip(&ops.insts).filter(|(owner, _)| **owner == number);
            let before = std::mem::replace(&mut thread.ops, left().count());
            thread.bytes = left().map(|(_, inst)| inst.bytes).sum();
            thread.kept = left().map(|(_, inst)| inst.kept).sum();
            thread.look_at = 0;
            if thread.ops == 0 {
                thread.taken = 0;
            }
            if let Some(&began) = began.get(&number).filter(|_| thread.ops > 0) {
                let (began, launched) = thread.round.unwrap_or((began, 0));
                thread.round = Some((began, launched + before - thread.ops));
            }
        }
        others.ops = ops.len() - own.ops;
    }
}

/// The Python line of the first op of each thread.
type Began = FxHashMap<u64, Site>;

/// Of all ops, those that are wanted with all that they need.
fn with_needs(values: &Results<'_>, mut wanted: Vec<bool>) -> Vec<bool> {
    let mut needed = vec![false; values.part.ops.results()];
    let ops: Vec<_> = values.part.ops.iter().collect();
    for op in ops.iter().rev() {
        wanted[op.at] |= op.results().any(|i| needed[i]);
        if wanted[op.at] {
            let results = op.operands.iter().filter(|&code| code & PRODUCED != 0);
            results.for_each(|code| needed[(code & !PRODUCED) as usize] = true);
        }
    }
    wanted
}

/// Which ops are wanted, by the threads that recorded them.
fn chosen(values: &Results<'_>, owners: &[u64], own: u64, whose: &Whose<'_>) -> Vec<bool> {
    let all_own = || owners.iter().map(|&owner| owner == own).collect();
    match whose {
        Whose::All => vec![true; owners.len()],
        Whose::Own => all_own(),
        Whose::Value(value) => {
            let is_it = |i: usize| values.get(i as u32).is_some_and(|v| Arc::ptr_eq(&v, value));
            let maker = values.part.ops.iter().find(|op| op.results().any(is_it)).map(|op| op.at);
            match maker {
                Some(at) if owners[at] == own => all_own(),
                _ => (0..owners.len()).map(|at| Some(at) == maker).collect(),
            }
        }
    }
}

impl Stream {
    /// Launches some of what several threads recorded.
    pub(crate) fn flush_some(&self, w: &mut Window, whose: &Whose<'_>, ending: Ending<'_>) -> Result<()> {
        let own = w.thread.number;
        w.thread.ops = w.own_ops();
        let threads = || w.others.threads.iter().chain([&w.thread]);
        let began: Began = threads().map(|t| (t.number, w.first_site_of(t.number))).collect();
        let options: FxHashMap<u64, u32> = threads().map(|t| (t.number, t.options)).collect();
        let round = w.round_after(ending.reason);
        let mut owners = w.owners();
        let (whole, needed) = w.take_part();
        if let Some(needed) = needed {
            let mut needed = needed.into_iter();
            owners.retain(|_| needed.next().unwrap_or_default());
        }
        let produced = std::mem::take(&mut w.produced);
        let values = Results { part: &whole, produced: &produced };
        let is_wanted = with_needs(&values, chosen(&values, &owners, own, whose));
        // What is not wanted is another stretch.
        let place = |(wanted, owner): (&bool, &u64)| if *wanted { (0, *owner) } else { (1, 0) };
        let places: Vec<Position> = is_wanted.iter().zip(&owners).map(place).collect();
        let (part_of, places) = grouped(&whole.ops, &places);
        let mut parts = parts(&values, &part_of, places.len());
        let stays = parts.pop_if(|_| places.last() == Some(&(1, 0))).unwrap_or_default();
        let staying = || whole.ops.iter().filter(|op| !is_wanted[op.at]);
        let produced_still = staying().flat_map(|op| op.results()).map(|i| values.get(i as u32)).collect();
        let owners_still: Vec<u64> = staying().map(|op| owners[op.at]).collect();
        w.put_back(stays, produced_still, &owners_still, &began);
        if w.thread.ops == 0 {
            (w.thread.round, w.thread.first_upload) = (round, None);
        }
        let mut result = Ok(());
        let last = parts.len().saturating_sub(1);
        for (i, (part, (_, thread))) in parts.iter_mut().zip(&places).enumerate() {
            part.options = options.get(thread).copied().unwrap_or_default();
            let ending = if i == last { ending } else { Reason::Part.into() };
            result = result.and(self.launch_window(w, part, &produced, ending));
        }
        let Window { thread: own, others, .. } = w;
        for thread in others.threads.iter_mut().chain([own]).filter(|t| t.ops == 0) {
            thread.notes.drain(..).for_each(|(_, note)| self.launcher.pass(note));
        }
        result
    }
}
