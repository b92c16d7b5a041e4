//! From recorded ops to a launch: when a window ends, what of it is computed, and which program that is.
//!
//! In strict and debug mode a window is one op. In fused mode it grows until something has to be known or until a good
//! place to cut it comes by. The places depend on nothing but the ops themselves, so every round of a loop is cut alike
//! and gives the programs that the round before gave:
//!
//! - somebody reads a value, or waits for the device;
//! - an optimizer has made its step; where the script drops the gradients right behind it, when it has;
//! - the Python line that began the window comes again, or the copy from the host that came first in it: a loop came
//!   round. Short loops go round several times in one window, as a launch costs as much as recording some ops;
//! - the window is full.

use crate::config::{Mode, Switches};
use crate::ending::Ending;
use crate::error::{Error, Result};
use crate::events::{self, What};
use crate::executor::Launch;
use crate::family::{self, Numbers};
use crate::graph::{Check, Given, Graph, Source};
use crate::known::{ByBound, Indices, Known, Lent, Split, Wanted};
use crate::mark::Note;
use crate::pad::enlarged;
use crate::part::{Part, Results, between, donors, parts};
use crate::profile::running;
use crate::program::Program;
use crate::site::Site;
use crate::split;
use crate::spread::How;
use crate::stream::Stream;
use crate::threads::{CROWD, Whose};
use crate::value::Value;
use crate::window::Window;
use oxitorch_capture::Reason;
use oxitorch_hlo::{DType, TensorType};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// Ops that make a window worth a launch when a loop comes round.
const WORTH_A_LAUNCH: usize = 64;

impl Window {
    /// Why the window has to end before an op of this line is recorded.
    pub(crate) fn is_over(&mut self, site: Site, switches: &Switches) -> Option<Reason> {
        let (ops, thread) = (self.own_ops(), &self.thread);
        if ops == 0 {
            return None;
        }
        if self.is_watched() {
            return (thread.options != switches.compiler_options).then_some(Reason::Options);
        }
        let (began, before) = thread.round.unwrap_or((self.first_site(), 0));
        let came_round = began == site && before + ops >= WORTH_A_LAUNCH && site != Site::default();
        [
            (thread.options != switches.compiler_options, Reason::Options),
            (thread.recompute_begins, Reason::Recompute),
            (came_round, Reason::Loop),
            (ops >= self.limits.ops || self.is_crowded(), Reason::Ops),
            (thread.bytes >= self.limits.bytes || thread.kept >= self.limits.kept, Reason::Bytes),
        ]
        .into_iter()
        .find_map(|(over, reason)| over.then_some(reason))
        .or_else(|| self.holds_too_much().then_some(Reason::Bytes))
    }

    /// Whether too much is on the device for this window alone. It is looked at each time that so much more was recorded,
    /// as a look goes through all inputs.
    fn holds_too_much(&mut self) -> bool {
        let recorded = self.thread.bytes.saturating_add(self.thread.taken);
        if recorded < self.thread.look_at.max(self.limits.held) || self.in_body() {
            return false;
        }
        let is_too_much = self.held() >= self.most_held();
        self.thread.look_at = if is_too_much { 0 } else { recorded.saturating_add(self.limits.held / 2) };
        is_too_much
    }

    /// The same before a copy from the host, which needs room and takes long: less is too much then.
    pub(crate) fn holds_too_much_for_upload(&self) -> bool {
        let most = self.most_held() / 4;
        self.own_ops() > 0 && self.thread.taken >= most && !self.in_body() && self.held() >= most
    }

    /// A window that computes much is bounded by that, and may hold what it computes from.
    fn most_held(&self) -> u64 {
        let most = self.limits.held.saturating_mul(if self.others.ops > 0 { CROWD as u64 } else { 1 });
        most.saturating_add(self.thread.kept.saturating_mul(2))
    }

    /// Bytes of inputs that nobody sees any more and that no result replaces, for all threads.
    fn held(&self) -> u64 {
        let unseen = || self.inputs.iter().filter(|v| !v.is_visible()).map(|v| v.bytes()).sum::<u64>();
        let most = unseen();
        if most < self.most_held() / 4 {
            return most;
        }
        let seen = || self.produced.iter().flatten().filter(|v| v.is_visible()).map(|v| v.bytes());
        let replaced = donors(&self.inputs, seen, |_| false);
        most.saturating_sub(replaced.iter().map(|&i| self.inputs[i as usize].bytes()).sum())
    }

    /// Whether the window has to end before a copy from the host.
    fn ends_before_upload(&self, site: Site) -> bool {
        let came_round = self.thread.first_upload == Some(site) && site != Site::default();
        came_round && self.own_ops() >= WORTH_A_LAUNCH
    }
}

/// A program that launches what was asked for and nothing else: the inputs that it overwrites, and the offsets that it takes.
pub(crate) type Direct = (Indices, Arc<Program>, Numbers);

/// The program that a part is launched as.
pub(crate) struct Chosen {
    lent: Lent,
    is_new: bool,
    /// If the program is for more sizes than those of the part.
    by_bound: Option<ByBound>,
}

impl Chosen {
    /// One for all sizes up to a bound.
    pub(crate) fn by_bound(by: ByBound, is_new: bool, offsets: &[i64]) -> Chosen {
        let (program, numbers) = (by.program.clone(), by.given(offsets));
        let lent = Lent { program, numbers, live: None, donated: None, stands_in: false };
        Chosen { lent, is_new, by_bound: Some(by) }
    }
}

/// Why a window ended, and when if somebody listens.
#[derive(Clone, Copy)]
pub(crate) struct Cut<'a> {
    pub(crate) ending: Ending<'a>,
    /// Whether it is about a part of the window.
    is_part: bool,
    /// Whether that part may repeat with other offsets.
    repeats: bool,
    /// Whether another program may stand in for the one that it would have.
    may_lend: bool,
    /// Whether that may be one for more sizes.
    may_enlarge: bool,
    /// Whether its sizes may be seen to vary, as far as the window says of which it is a part.
    pub(crate) may_vary: bool,
    began: Option<Instant>,
}

impl<'a> Cut<'a> {
    /// Of all of a window.
    fn whole(ending: Ending<'a>, began: Option<Instant>, may_lend: bool) -> Cut<'a> {
        Cut { ending, is_part: false, repeats: false, may_lend, may_enlarge: false, may_vary: true, began }
    }

    /// Whether a window ends so where a program for many sizes may serve it, or whether that was asked of its whole.
    pub(crate) fn ends_any_size(&self) -> bool {
        let ends = [Reason::Read, Reason::Wait, Reason::Step, Reason::Loop, Reason::Jit];
        self.may_vary && (self.is_part || ends.contains(&self.ending.reason))
    }

    /// Whether it is about a part of a window that varies: it may never come again.
    pub(crate) fn varies(&self) -> bool {
        self.is_part && !self.repeats
    }
}

impl Window {
    /// Makes the key of these ops, and looks for the sizes of it that followed from values.
    fn set_key(&mut self, part: &mut Part, on_mesh: bool) {
        part.read = self.read_sizes(part);
        self.key.clear();
        self.key.push(part.options);
        if on_mesh {
            self.key.push(part.inputs.len() as u32);
            for input in &part.inputs {
                let sharding = self.sharding_number(&input.sharding);
                self.key.push(sharding);
            }
        }
        for op in part.ops.iter() {
            self.key.push(op.inst.id);
            self.key.extend_from_slice(op.operands);
        }
    }
}

impl Stream {
    /// Launches what the running thread recorded. In debug mode the caller then waits; see [`Stream::after_op`].
    pub(crate) fn flush<'a>(&self, w: &mut Window, ending: impl Into<Ending<'a>>) -> Result<()> {
        self.flush_for(w, &Whose::Own, ending)
    }

    /// Launches some of what was recorded.
    pub(crate) fn flush_for<'a>(
        &self,
        w: &mut Window,
        whose: &Whose<'_>,
        ending: impl Into<Ending<'a>>,
    ) -> Result<()> {
        let ending = ending.into();
        if w.in_body() {
            return w.leave("what it recorded to be launched");
        }
        if let Some(reason) = w.thread.noted_waits.take() {
            return match w.others.ops {
                0 => self.flush_whole(w, reason, |_| drop),
                _ => self.flush_now(w, whose, reason.into()),
            };
        }
        if !std::mem::take(&mut w.thread.step_waits) {
            return self.flush_now(w, whose, ending);
        }
        let result = self.flush_now(w, whose, Reason::Step.into());
        self.executor.stepped();
        result
    }

    fn flush_now(&self, w: &mut Window, whose: &Whose<'_>, ending: Ending<'_>) -> Result<()> {
        let frees = ending.reason == Reason::Bytes && w.held() >= w.most_held() / 4;
        let whose = if frees || w.is_crowded() { &Whose::All } else { whose };
        if w.ops.is_empty() || (matches!(whose, Whose::Own) && w.own_ops() == 0) {
            w.thread.first_upload = None;
            return Ok(());
        }
        let result =
            if w.others.ops > 0 { self.flush_some(w, whose, ending) } else { self.flush_window(w, ending) };
        w.instances.tick();
        w.stamps.clear();
        w.stamped = self.metrics().events.on();
        if frees {
            self.launcher.frees();
        }
        result
    }

    /// An optimizer has made its step. What was recorded is launched now; or if the script may drop the gradients, once it
    /// has, or before whatever else it does. Gives whether it waits for that.
    pub fn step(&self, may_drop: bool, site: Site) -> Result<bool> {
        events::here(site);
        let mut w = self.lock(site);
        if w.is_watched() {
            return Ok(false); // the step is a part of the function
        }
        self.end_step(&mut w)?;
        if may_drop && w.own_ops() > 0 {
            w.thread.step_waits = true;
            return Ok(true);
        }
        self.flush(&mut w, Reason::Step)?;
        Ok(false)
    }

    /// The script has dropped gradients: a step that waits for that is launched. Gives whether there was one.
    pub fn dropped_gradients(&self, site: Site) -> Result<bool> {
        events::here(site);
        let mut w = self.lock(site);
        let waited = w.thread.step_waits;
        self.end_step(&mut w)?;
        Ok(waited)
    }

    /// Notes a copy from the host, before which the window may have to end: then it is the first of the next one.
    pub(crate) fn make_room_for_upload(&self, w: &mut Window, site: Site) -> Result<()> {
        if w.is_watched() {
            return Ok(());
        }
        self.end_step(w)?;
        if w.ends_before_upload(site) {
            self.flush(w, Reason::Loop)?;
        }
        w.thread.first_upload.get_or_insert(site);
        Ok(())
    }

    /// Launches what was recorded, all of it by one thread.
    fn flush_window(&self, w: &mut Window, ending: Ending<'_>) -> Result<()> {
        self.end_window(w, ending.reason, |w, part, produced| self.launch_window(w, part, produced, ending))
    }

    /// Launches what was recorded, all of it by one thread, as one program whatever is known of parts of it. `look` sees it
    /// before, and gives what is done with the program afterwards.
    pub(crate) fn flush_whole<F: FnOnce(Direct)>(
        &self,
        w: &mut Window,
        reason: Reason,
        look: impl FnOnce(&Results<'_>) -> F,
    ) -> Result<()> {
        self.end_window(w, reason, |w, part, produced| {
            if part.outputs.is_empty() {
                return Ok(());
            }
            part.options = self.compiler.in_force(part.options);
            let then = look(&Results { part, produced });
            self.launch_whole(w, part, reason.into(), then)
        })
    }

    /// The program for what was recorded, all of it by one thread, which is not launched; none if nothing comes of it.
    pub(crate) fn program_of_whole(
        &self,
        w: &mut Window,
        ending: Ending<'_>,
    ) -> Result<Option<Arc<Program>>> {
        let mut program = None;
        self.end_window(w, ending.reason, |w, part, _| {
            if part.outputs.is_empty() {
                return Ok(());
            }
            part.options = self.compiler.in_force(part.options);
            w.set_key(part, self.devices.is_some());
            let cut = Cut::whole(ending, None, false);
            let chosen = self.program(w, part, &part.donated(), cut)?;
            program = Some(chosen.lent.program);
            Ok(())
        })?;
        Ok(program)
    }

    /// Looks at what was recorded, all of it by one thread, which is not launched.
    pub(crate) fn look_at_whole(
        &self,
        w: &mut Window,
        reason: Reason,
        look: impl FnOnce(&Results<'_>),
    ) -> Result<()> {
        self.end_window(w, reason, |_, part, produced| {
            part.options = self.compiler.in_force(part.options);
            look(&Results { part, produced });
            Ok(())
        })
    }

    /// Launches a part as one program; what is known of that program goes to `then`, unless another one stood in.
    pub(crate) fn launch_whole(
        &self,
        w: &mut Window,
        part: &mut Part,
        ending: Ending<'_>,
        then: impl FnOnce(Direct),
    ) -> Result<()> {
        self.metrics().count(&self.metrics().flushes[ending.reason as usize]);
        let began = self.metrics().events.on().then(Instant::now);
        w.set_key(part, self.devices.is_some());
        let cut = Cut::whole(ending, began, true);
        if self.launch_by_bound(w, part, cut)? {
            return Ok(());
        }
        if let Some(direct) = self.launch_part(w, part, cut)? {
            then(direct);
        }
        Ok(())
    }

    /// Launches what is known to be launched by a program; with other checks than those of the program if it is for many
    /// sizes, or of other lines.
    pub(crate) fn launch_known(
        &self,
        w: &mut Window,
        inputs: SmallVec<[Arc<Value>; 4]>,
        outputs: SmallVec<[Arc<Value>; 2]>,
        (first, ops): (Site, usize),
        (program, numbers, checks): (Arc<Program>, &Numbers, Option<Arc<[Check]>>),
        ending: Ending<'_>,
    ) {
        self.metrics().count(&self.metrics().flushes[ending.reason as usize]);
        self.metrics().count(&self.metrics().window_hits);
        w.take_sizes(&inputs, &outputs);
        let mut inputs = inputs;
        if !numbers.is_empty() {
            inputs.push(Value::offsets(numbers));
        }
        let began = self.metrics().events.on().then(Instant::now);
        let cut = Cut::whole(ending, began, true);
        let window = self.recorded(w, &program, cut, false);
        let ends_step = ending.reason == Reason::Step;
        let before = self.launcher.front.launches(ends_step);
        let launch = Launch {
            program,
            inputs,
            outputs,
            donated: None,
            ops: ops as u64,
            first,
            window,
            before,
            ends_step,
            agreement: None,
            checks,
            notes: Vec::new(),
        };
        self.executor.launch(launch, false);
    }

    /// Takes what was recorded, all of it by one thread, and begins a new window.
    fn end_window(
        &self,
        w: &mut Window,
        reason: Reason,
        launch: impl FnOnce(&mut Window, &mut Part, &[Option<Arc<Value>>]) -> Result<()>,
    ) -> Result<()> {
        (w.thread.round, w.thread.first_upload) = (w.round_after(reason), None);
        let recorded = w.ops.len() as f64;
        let (mut part, _) = w.take_part();
        part.notes = w.thread.notes.drain(..).map(|(ops, note)| (ops as f64 / recorded, note)).collect();
        let produced = std::mem::take(&mut w.produced);
        let result = launch(w, &mut part, &produced);
        self.pass(std::mem::take(&mut part.notes)); // those of what came to nothing
        w.produced = produced;
        if w.ops.is_empty() {
            w.ops = part.ops; // its memory
        }
        w.inputs = part.inputs;
        w.ops.clear();
        w.inputs.clear();
        w.clear_produced();
        w.clear_threads();
        w.next_epoch();
        result
    }

    /// Launches what is one window, or the part of one that a thread has: as one program, or in parts if it has none and
    /// parts of it are known or repeat. `produced`: all results of the window.
    pub(crate) fn launch_window(
        &self,
        w: &mut Window,
        whole: &mut Part,
        produced: &[Option<Arc<Value>>],
        ending: Ending<'_>,
    ) -> Result<()> {
        if whole.outputs.is_empty() {
            self.pass(std::mem::take(&mut whole.notes));
            return Ok(());
        }
        self.metrics().count(&self.metrics().flushes[ending.reason as usize]);
        let began = self.metrics().events.on().then(Instant::now);
        let cut = Cut { may_enlarge: true, ..Cut::whole(ending, began, true) };
        whole.options = self.compiler.in_force(whole.options);
        w.set_key(whole, self.devices.is_some());
        let deterministic = self.compiler.policy.is_deterministic();
        if self.launch_by_bound(w, whole, cut)? {
            w.lines.is_known(w.site); // new are its sizes alone
            return Ok(());
        }
        let cuts = match w.programs.get_mut(&w.key).filter(|known| known.has_programs()) {
            Some(known) => {
                w.lines.is_known(w.site);
                let split = known.split.as_ref().filter(|s| !s.is_over(deterministic));
                split.map(|s| (s.part_of.clone(), s.repeats()))
            }
            None => self.cuts(w, whole, cut),
        };
        let Some((part_of, repeats)) = cuts else { return self.launch_part(w, whole, cut).map(drop) };
        self.count_split(w, whole, cut).inspect_err(|e| whole.fail(e))?;
        let count = part_of.iter().max().map_or(0, |last| *last as usize + 1);
        // What repeats varies in how often; it has a program for some powers of two. Single ops vary in their sizes.
        let may_vary = (!repeats || count == part_of.len()) && self.parts_may_vary(cut);
        let mut parts = parts(&Results { part: whole, produced }, &part_of, count);
        let last = count.saturating_sub(1);
        let mut failed = None;
        for (i, part) in parts.iter_mut().enumerate() {
            if part.outputs.is_empty() {
                continue;
            }
            match &failed {
                Some(e) => part.fail(e),
                None => {
                    w.set_key(part, self.devices.is_some());
                    let ending = if i == last { cut.ending } else { Reason::Part.into() };
                    let cut = Cut { ending, is_part: true, repeats, may_vary, ..cut };
                    failed = match self.launch_by_bound(w, part, cut) {
                        Ok(true) => None,
                        Ok(false) => self.launch_part(w, part, cut).err(),
                        Err(e) => Some(e),
                    };
                }
            }
        }
        whole.outputs.clear();
        self.pass(std::mem::take(&mut whole.notes)); // where in which part they are, nobody knows
        failed.map_or(Ok(()), Err)
    }

    /// Marks that are in no program are reached when the device has run what is launched.
    pub(crate) fn pass(&self, notes: Vec<(f64, Note)>) {
        notes.into_iter().for_each(|(_, note)| self.launcher.pass(note));
    }

    /// The part of each op of a window that was not seen before, and whether its parts repeat. One that is captured to
    /// be looked at stays whole.
    fn cuts(&self, w: &mut Window, part: &Part, cut: Cut<'_>) -> Option<(Arc<[u32]>, bool)> {
        if matches!(cut.ending.reason, Reason::Mode | Reason::Collective) || !self.compiles() {
            return None;
        }
        let tokens = part.tokens();
        let number = self.metrics().splits.load(Relaxed) + 1;
        // Windows that end at a bound are new once for each place of a long round.
        let ends_round =
            [Reason::Read, Reason::Wait, Reason::Step, Reason::Loop].contains(&cut.ending.reason);
        let line = Some(w.site).filter(|line| ends_round && tokens.len() > 1 && *line != Site::default());
        let backwards = line.and_then(|_| split::cuts_behind_backwards(&part.ops.sites));
        // One of several backwards says nothing of what its line does with one.
        let is_always_new =
            backwards.is_none() && line.is_some_and(|line| w.lines.is_always_new(line, &tokens));
        let adds_up = backwards.filter(|_| line.is_some_and(|line| w.lines.adds_up_often(line)));
        let between = |cuts: &[usize]| between(cuts, tokens.len());
        let (part_of, for_good) = match (adds_up, split::cuts_of_long(&tokens)) {
            (Some(cuts), _) => (between(&cuts), false),
            (None, Some(cuts)) => (between(&cuts), true),
            (None, None) => {
                match self.parts_by_size(w, part).or_else(|| Some(between(&w.sequences.cuts(&tokens)?))) {
                    Some(part_of) => (part_of, false),
                    None if is_always_new => ((0..tokens.len() as u32).collect(), false),
                    None => return None,
                }
            }
        };
        let split = Split::new(number, part_of, for_good);
        let cuts = (split.part_of.clone(), split.repeats());
        self.metrics().count(&self.metrics().splits);
        w.programs.entry(&w.key).split = Some(split);
        Some(cuts)
    }

    /// Counts a launch in parts; after some, a program of the whole window is compiled while parts go on.
    fn count_split(&self, w: &mut Window, whole: &Part, cut: Cut<'_>) -> Result<()> {
        let known = w.programs.get_mut(&w.key);
        let Some(split) = known.and_then(|k| k.split.as_mut()) else { return Ok(()) };
        let is_worth_it = split.used(w.last_split);
        w.last_split = split.number;
        if !is_worth_it {
            return Ok(());
        }
        let cut = Cut { may_enlarge: false, ..cut };
        let program = self.program(w, whole, &whole.donated(), cut)?.lent.program;
        if let Some(split) = w.programs.get_mut(&w.key).and_then(|k| k.split.as_mut()) {
            split.set_whole(program);
        }
        Ok(())
    }

    /// Launches a part by a program of its key; says by which, unless another one stood in.
    fn launch_part(&self, w: &mut Window, part: &mut Part, cut: Cut<'_>) -> Result<Option<Direct>> {
        let donated = part.donated();
        let most = part.most_donated();
        let wanted = most.as_ref().unwrap_or(&donated);
        let chosen = self.program(w, part, wanted, cut).inspect_err(|e| part.fail(e))?;
        let lent = &chosen.lent;
        let stood_in = lent.stands_in || most.is_some() || chosen.by_bound.is_some();
        let direct = (!stood_in).then(|| (donated.clone(), lent.program.clone(), lent.numbers.clone()));
        let allowed = if most.is_some() { Some(donated) } else { lent.donated.clone() };
        self.launch_chosen(w, part, chosen, allowed, cut);
        Ok(direct)
    }

    /// Launches a part by this program. `donated`: the inputs that may be overwritten, if it would overwrite others too.
    pub(crate) fn launch_chosen(
        &self,
        w: &mut Window,
        part: &mut Part,
        Chosen { lent, is_new, by_bound }: Chosen,
        donated: Option<Indices>,
        cut: Cut<'_>,
    ) {
        let program = lent.program;
        let mut inputs: SmallVec<[Arc<Value>; 4]> = SmallVec::new();
        inputs.extend(part.inputs.drain(..));
        if let Some(by_bound) = &by_bound {
            self.enlarge(&mut inputs, &by_bound.inputs);
        }
        let sizes = by_bound.as_ref().map(|by_bound| &by_bound.numbers);
        for numbers in [Some(&lent.numbers), sizes].into_iter().flatten().filter(|n| !n.is_empty()) {
            inputs.push(Value::offsets(numbers));
        }
        let window = self.recorded(w, &program, cut, is_new);
        let ends_step = cut.ending.reason == Reason::Step;
        let before = self.launcher.front.launches(ends_step);
        let (first, ops) = (part.ops.sites[0], part.ops.len() as u64);
        let own = match &lent.live {
            Some(live) => part.outputs_among(live),
            None => std::mem::take(&mut part.outputs),
        };
        let (outputs, larger) = match &by_bound {
            Some(by_bound) => enlarged(own, &by_bound.results),
            None => (own, Vec::new()),
        };
        let mut asked = part.asked.take();
        let agreement = asked.as_mut().and_then(|a| a.agreement.take());
        let notes = std::mem::take(&mut part.notes);
        let checks = match by_bound {
            Some(by_bound) => Some(by_bound.checks),
            None => program.checks_at(&part.ops.sites, |site| site),
        };
        let launch = Launch {
            program,
            inputs,
            outputs,
            donated,
            ops,
            first,
            window,
            before,
            ends_step,
            agreement,
            checks,
            notes,
        };
        match asked {
            Some(asked) => self.executor.collective(launch, asked),
            None => self.executor.launch(launch, cut.ending.reason == Reason::Read && larger.is_empty()),
        }
        self.cut_to_size(larger);
    }

    /// Tells who listens what was recorded; the window's number, 0 if nobody does.
    pub(crate) fn recorded(
        &self,
        w: &mut Window,
        program: &Program,
        Cut { ending, began, .. }: Cut<'_>,
        is_new: bool,
    ) -> u64 {
        let events = &self.metrics().events;
        let number = events.window();
        if let Some(cut) = began {
            let start = w.stamps.first().map_or(cut, |s| s.at);
            events.add(start, || What::Window {
                device: self.device,
                number,
                program: program.name.clone(),
                is_new,
                ended: ending.at(w.site),
                ops: std::mem::take(&mut w.stamps),
                cut,
                launched_in: running(),
            });
        }
        number
    }

    /// The program for a part whose key is set.
    fn program(&self, w: &mut Window, part: &Part, donated: &Indices, cut: Cut<'_>) -> Result<Chosen> {
        let wanted = Wanted {
            live: &part.live,
            donated,
            offsets: &part.ops.offsets,
            max_fixed: if cut.ending.reason == Reason::Mode { family::MAX_FIXED_OF_ONE_OP } else { 1 },
            may_lend: cut.may_lend && cut.ending.reason != Reason::Mode && self.compiles(),
            ends_round: matches!(cut.ending.reason, Reason::Step | Reason::Loop | Reason::Jit),
        };
        let mut known = w.programs.get_mut(&w.key);
        let places = match known.as_mut().map(|k| k.choose(&wanted)) {
            Some(Ok(lent)) => {
                self.metrics().count(&self.metrics().window_hits);
                return Ok(Chosen { lent, is_new: false, by_bound: None });
            }
            Some(Err(places)) => part.ops.whole(&places),
            None if cut.repeats => (0..part.ops.offsets.len() as u32).collect(),
            None => Box::default(),
        };
        if cut.may_enlarge
            && cut.ending.reason != Reason::Mode
            && let Some((by, is_new)) = self.by_read_sizes(w, part, cut)?
        {
            self.metrics().window_hits.fetch_add(u64::from(!is_new), Relaxed);
            if !is_new {
                w.lines.is_known(w.site); // new are its sizes alone
            }
            return Ok(Chosen::by_bound(by, is_new, &part.ops.offsets));
        }
        let known = w.programs.get_mut(&w.key);
        let along = if places.is_empty() { Vec::new() } else { part.ops.along() };
        let given = known.unwrap_or(&mut Known::default()).given(&wanted, &places, &along);
        let program = self.make(w, part, donated, &given, cut)?;
        if !matches!(cut.ending.reason, Reason::Mode | Reason::Collective) {
            w.sequences.add(part.tokens(), cut.is_part);
        }
        let known = w.programs.entry(&w.key);
        known.add(&wanted, &given, program.clone());
        let numbers = family::numbers(&given, &part.ops.offsets).unwrap_or_default();
        Ok(Chosen {
            lent: Lent { program, numbers, live: None, donated: None, stands_in: false },
            is_new: true,
            by_bound: None,
        })
    }

    /// Whether programs are compiled here, and not only captured.
    pub(crate) fn compiles(&self) -> bool {
        self.target().is_present()
    }

    /// Makes a program for a part, which takes these offsets.
    fn make(
        &self,
        w: &Window,
        part: &Part,
        donated: &Indices,
        given: &[Given],
        cut: Cut<'_>,
    ) -> Result<Arc<Program>> {
        let count = given.iter().map(|g| i64::from(g.number) + 1).max().unwrap_or(0);
        let numbers = TensorType::new(DType::S64, [count].as_slice());
        let inputs = part.inputs.iter().map(|v| v.ty.clone());
        let inputs: Vec<TensorType> = inputs.chain((!given.is_empty()).then_some(numbers)).collect();
        let spread = self.spread(part, &inputs)?;
        let replicas = spread.as_ref().filter(|s| s.how != How::Partitions);
        let graph = Graph {
            ops: part.ops.clone(),
            inputs: replicas.map_or(inputs, |s| s.params.clone()),
            given: given.into(),
            donated: donated.iter().copied().collect(),
            options: part.options,
            live: part.live.clone(),
            spread,
            source: Source { ended: Some(cut.ending.at(w.site)), varies: cut.varies(), ..Source::default() },
            sample: None,
        };
        self.begin_program(graph)
    }

    /// The program of a graph, which the compiler begins to work on.
    pub(crate) fn begin_program(&self, graph: Graph) -> Result<Arc<Program>> {
        let program = Program::new(&graph);
        self.explainer.explain(&graph, &program).map_err(|why| {
            Error::runtime(format!(
                "torch.tpu.max_graphs allows no more programs, and a new one is needed\n{why}"
            ))
        })?;
        self.metrics().count(&self.metrics().programs);
        self.compiler.submit(graph, program.clone(), self.at as i64);
        Ok(program)
    }

    /// Launches a step that waits for the script to drop its gradients.
    pub(crate) fn end_step(&self, w: &mut Window) -> Result<()> {
        let waits = w.thread.step_waits || w.thread.noted_waits.is_some();
        if waits { self.flush(w, Reason::Step) } else { Ok(()) }
    }

    /// Before an op of this line is recorded: the window has the thread's compiler options. In fused mode, what was recorded
    /// is launched if it has to end here.
    pub(crate) fn make_room(&self, w: &mut Window, site: Site, switches: &Switches) -> Result<()> {
        self.end_step(w)?;
        if switches.mode == Mode::Fused {
            let over = w.is_over(site, switches);
            w.thread.recompute_begins = false;
            over.map_or(Ok(()), |reason| self.flush(w, reason))?;
        }
        w.thread.options = switches.compiler_options;
        Ok(())
    }
}
