//! Calls of a function that has collectives of several processes: programs, and the collectives between them.
//!
//! Each collective ends a program, as it does when it is recorded. The first call by a recipe finds out how each program
//! is launched, on arguments that nobody has; from then on a call makes the values of all programs and collectives, and
//! queues these in their order. What a later one needs is held until then, so that no earlier program overwrites it.

use crate::config::Switches;
use crate::ending::Ending;
use crate::error::{Error, Refusal, Result};
use crate::executor::Agreement;
use crate::lanes::Turn;
use crate::mesh::Exchanged;
use crate::processes::over;
use crate::program::Program;
use crate::recipe::{Between, How, Prepared, Recipe, Shape, Source, Step, Steps, Whole, address};
use crate::replay::{Called, Recorded, Rehearsal, Values};
use crate::site::Site;
use crate::stream::Stream;
use crate::threads::Whose;
use crate::value::{Held, Slot, State, Value};
use crate::window::Window;
use crate::work::{Group, Lane, Task, Work, next};
use oxitorch_capture::Reason;
use parking_lot::MutexGuard;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::sync::Arc;

/// The locked numbers of a recipe's groups: what is recorded of them at once is in one order.
pub(crate) type Orders<'r> = SmallVec<[(&'r Group, MutexGuard<'r, FxHashMap<Lane, u64>>); 1]>;

impl Recipe {
    /// Locks the groups of its collectives, in the order in which all calls do.
    pub(crate) fn orders(&self) -> Orders<'_> {
        let mut groups: SmallVec<[&Group; 4]> = self.between.iter().map(|b| &*b.about.group).collect();
        groups.sort_unstable_by_key(|group| address(*group));
        groups.dedup_by_key(|group| address(*group));
        groups.into_iter().map(|group| (group, group.numbers.lock())).collect()
    }
}

/// A collective of a call, in its place.
struct Begun {
    task: Box<dyn Task>,
    work: Arc<Work>,
    turn: Turn,
}

/// What is recorded between two collectives.
struct Range {
    /// The number of its first result.
    first: u32,
    /// The number of the collective behind it; none behind the last.
    between: Option<usize>,
}

/// Values that are needed by later steps.
struct Later {
    /// By the last of these, the latest first.
    held: Vec<(usize, Option<Held>)>,
}

impl Later {
    /// Before the last step that needs them is launched, which may overwrite them.
    fn release(&mut self, step: usize) {
        while self.held.pop_if(|(last, _)| *last <= step).is_some() {}
    }
}

impl Stream {
    /// Launches a recipe with collectives. None if they cannot be done again, and nothing was recorded.
    pub(crate) fn run_steps(
        &self,
        w: &mut Window,
        call: Called<'_>,
        values: Values<'_>,
        whole: &Whole,
        orders: &mut Orders<'_>,
        switches: &Switches,
    ) -> Result<Option<Vec<Slot>>, Refusal> {
        let again = |b: &Arc<Between>| b.pattern.lock().again();
        let Some(tasks) = call.recipe.between.iter().map(again).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        self.flush_for(w, &Whose::All, Reason::Jit)?;
        w.thread.options = switches.compiler_options;
        let options = self.compiler.in_force(switches.compiler_options);
        let known = whole.steps.lock().clone().filter(|steps| steps.options == options);
        let steps = match known {
            Some(steps) => steps,
            None => {
                let Some(steps) = self.steps(w, call, options)?.map(Arc::new) else { return Ok(None) };
                // The numbers of programs that take offsets are of this call.
                if call.recipe.moving.is_empty() {
                    *whole.steps.lock() = Some(steps.clone());
                }
                steps
            }
        };
        let begin = |(mut task, between): (Box<dyn Task>, &Arc<Between>)| {
            let group = address(&*between.about.group);
            let numbers = orders.iter_mut().find(|(own, _)| address(*own) == group);
            task.begin(numbers.map_or(0, |(_, numbers)| next(numbers, between.lane)));
            let (work, turn) =
                (Arc::new(Work::new(task.about(), between.lane)), self.launcher.groups.turn(between.lane));
            Begun { task, work, turn }
        };
        let begun = tasks.into_iter().zip(&call.recipe.between).map(begin).collect();
        self.launch_steps(w, call, values, &steps, begun, whole.reason()).map(Some)
    }

    /// Finds out how the programs of a recipe are launched.
    fn steps(&self, w: &mut Window, call: Called<'_>, options: u32) -> Result<Option<Steps>> {
        let (mut steps, mut is_known) = (Vec::new(), true);
        let results = self.rehearse_steps(w, call, |w, call, values, Range { first, between }| {
            self.look_at_whole(w, Reason::Jit, |found| {
                if !found.part.outputs.is_empty() {
                    let shape = call.shape(found, values, first);
                    is_known &= shape.is_some();
                    steps.extend(shape.map(Step::Program));
                }
            })?;
            steps.extend(between.map(Step::Between));
            Ok(())
        })?;
        let held = later(&steps, call.recipe);
        Ok(is_known.then_some(Steps { options, steps, results, held }))
    }

    /// Makes the programs of a recipe with collectives, as a call would on arguments that nobody else has.
    pub(crate) fn prepare_steps(
        &self,
        recipe: &Recipe,
        whole: &Whole,
        site: Site,
        switches: &Switches,
    ) -> Result<Vec<Prepared<Arc<Program>>>> {
        let mut w = self.lock(site);
        if w.tape.is_some() {
            return Ok(Vec::new());
        }
        self.flush(&mut w, Reason::Jit)?;
        w.thread.options = switches.compiler_options;
        if w.others.ops > 0 {
            return Ok(Vec::new()); // what other threads recorded is in the window
        }
        let mut prepared = Vec::new();
        let call = Called::of(recipe, self.device, site);
        self.rehearse_steps(&mut w, call, |w, call, _, Range { between, .. }| {
            let collective = between.map(|number| &recipe.between[number]);
            let program = match collective {
                None => self.program_of_whole(w, whole.reason().into())?,
                Some(between) => {
                    let which = || between.call();
                    w.site = call.line(between.site);
                    self.program_of_whole(w, Ending::collective(&which))?
                }
            };
            prepared.extend(program.map(Prepared::Program));
            prepared.extend(collective.map(|between| Prepared::Collective(between.call())));
            Ok(())
        })?;
        Ok(prepared)
    }

    /// Records a recipe on arguments that nobody else has, and has `end` end each window; gives the number of results.
    fn rehearse_steps(
        &self,
        w: &mut Window,
        call: Called<'_>,
        mut end: impl FnMut(&mut Window, &Called<'_>, &Values<'_>, Range) -> Result<()>,
    ) -> Result<usize> {
        let recipe = call.recipe;
        let rehearsal = Rehearsal::new(recipe, self.device);
        let slots = rehearsal.slots();
        let call = call.with(&slots);
        let (mut values, mut recorded) = (rehearsal.values(recipe), Recorded::default());
        let last_uses = recipe.last_uses();
        let (mut held, mut made, mut seen) = (Vec::new(), Vec::new(), 0);
        let between = recipe.between.iter().map(Some).chain([None]);
        for (number, between) in between.enumerate() {
            let first = values.results.len();
            call.record_until(w, &mut values, &mut recorded, between.map_or(recipe.insts.len(), |b| b.at));
            // With those of the collective before, and as in a call, without what this part needs last.
            held.retain(|(last, _)| *last > number);
            let results = values.results.iter().zip(0..).skip(seen);
            let needed = results.filter_map(|(v, at)| Some((*last_uses.get(&at)?, Held::new(v.clone()?))));
            held.extend(needed.filter(|(last, _)| *last > number));
            seen = values.results.len();
            if between.is_none() {
                made = call.bind(&mut values);
            }
            end(w, &call, &values, Range { first: first as u32, between: between.map(|_| number) })?;
            if let Some(between) = between {
                values
                    .results
                    .extend(between.how.results().map(|ty| Some(Value::new(ty.clone(), State::Pending))));
            }
        }
        drop((made, held));
        Ok(values.results.len())
    }

    fn launch_steps(
        &self,
        w: &mut Window,
        call: Called<'_>,
        mut values: Values<'_>,
        Steps { steps, results, held, .. }: &Steps,
        begun: Vec<Begun>,
        reason: Reason,
    ) -> Result<Vec<Slot>, Refusal> {
        let recipe = call.recipe;
        values.draw_all();
        let mut outputs: Vec<SmallVec<[Arc<Value>; 2]>> = Vec::with_capacity(steps.len());
        values.results.resize(*results, None);
        for step in steps {
            outputs.push(self.outputs(w, call, step, &mut values)?);
        }
        let value = |(last, source): &(usize, Source)| (*last, values.of(*source).map(Held::new));
        let mut later = Later { held: held.iter().map(value).collect() };
        let made = call.bind(&mut values);
        let mut begun = begun.into_iter();
        let mut rest = outputs.into_iter().enumerate();
        let mut failed = None;
        while failed.is_none()
            && let Some((number, outputs)) = rest.next()
        {
            later.release(number);
            let done = match &steps[number] {
                Step::Between(at) => match begun.next() {
                    Some(begun) => {
                        self.queue_again(w, call, &recipe.between[*at], begun, &mut values, outputs)
                    }
                    None => Ok(()),
                },
                Step::Program(shape) => {
                    let next = begun
                        .as_slice()
                        .first()
                        .map(|b| (b, &recipe.between[recipe.between.len() - begun.len()]));
                    self.launch_step(w, call, shape, &mut values, outputs, next, reason)
                }
            };
            failed = done.err();
        }
        let Some(e) = failed else { return Ok(made) };
        if let Refusal::Error(e) = &e {
            let later = rest.flat_map(|(_, outputs)| outputs);
            later.for_each(|v| *v.state.lock() = State::Failed(e.clone()));
        }
        Err(e)
    }

    /// The values that a step makes.
    fn outputs(
        &self,
        w: &mut Window,
        call: Called<'_>,
        step: &Step,
        values: &mut Values<'_>,
    ) -> Result<SmallVec<[Arc<Value>; 2]>> {
        let mut outputs = SmallVec::new();
        match step {
            Step::Program(shape) => {
                for (number, ty, sharding, site) in &shape.results {
                    let value =
                        Value::sharded(ty.clone(), sharding.clone(), State::Pending, call.line(*site));
                    values.results[*number as usize] = Some(value.clone());
                    outputs.push(value);
                }
            }
            Step::Between(at) => {
                let between = &call.recipe.between[*at];
                for (ty, number) in between.how.results().zip(between.first as usize..) {
                    let value = self.to_write(w, ty.clone(), call.line(between.site))?;
                    values.results[number] = Some(value.clone());
                    outputs.push(value);
                }
            }
        }
        Ok(outputs)
    }

    /// Launches a program, which the next collective ends if there is one.
    #[expect(clippy::too_many_arguments, reason = "a program, its values, and why it ends")]
    fn launch_step(
        &self,
        w: &mut Window,
        call: Called<'_>,
        shape: &Shape,
        values: &mut Values<'_>,
        outputs: SmallVec<[Arc<Value>; 2]>,
        next: Option<(&Begun, &Arc<Between>)>,
        reason: Reason,
    ) -> Result<(), Refusal> {
        let inputs: SmallVec<[Arc<Value>; 4]> = shape.inputs.iter().filter_map(|s| values.of(*s)).collect();
        let Some((begun, between)) = next else {
            return Ok(self.launch_program(w, call, shape, inputs, outputs, reason.into())?);
        };
        let which = || begun.work.about().which(between.how.named().iter());
        w.site = call.line(between.site);
        let launched = self.launch_program(w, call, shape, inputs, outputs, Ending::collective(&which));
        w.site = call.site;
        Ok(launched?)
    }

    /// Does a collective once more, in its place.
    fn queue_again(
        &self,
        w: &mut Window,
        call: Called<'_>,
        between: &Between,
        Begun { task, work, turn }: Begun,
        values: &mut Values<'_>,
        outputs: SmallVec<[Arc<Value>; 2]>,
    ) -> Result<(), Refusal> {
        let site = call.line(between.site);
        match &between.how {
            How::Task { reads, writes, .. } => {
                let reads = reads.iter().map(|source| source.and_then(|s| values.of(s))).collect();
                let mut results = outputs.into_iter();
                let mut written = |(_, old): &(_, Option<Source>)| {
                    let old = old.and_then(|s| values.of(s));
                    results.next().map(|value| over(w, value, old))
                };
                let writes = writes.iter().map(|write| write.as_ref().and_then(&mut written)).collect();
                self.queue_task((task, work, turn), reads, writes, site);
                Ok(())
            }
            How::Program { exchange, groups, read, result } => {
                let agreement = Arc::new(Agreement::new(task, turn));
                let (Some(value), Some(out)) = (values.of(*read), outputs.first()) else {
                    return Err(Error::runtime("a collective without its value; please report this").into());
                };
                let (exchange, groups, result) = (exchange.clone(), groups.clone(), result.clone());
                let exchange = Exchanged { exchange, groups, value: Held::new(value), result };
                let launched =
                    self.launch_exchange(w, exchange, out, Some(agreement.clone()), site, |_| Ok(()));
                if let Err(Refusal::Error(e)) = &launched {
                    self.launcher.decline(&agreement, e, site); // the others are on their way
                }
                launched
            }
        }
    }
}

/// The values that later steps need than the one that makes them, with the last of these, the latest first.
fn later(steps: &[Step], recipe: &Recipe) -> Vec<(usize, Source)> {
    let mut uses: Vec<(Source, usize)> = Vec::new();
    let mut at: FxHashMap<Source, usize> = FxHashMap::default();
    for (number, step) in steps.iter().enumerate() {
        let sources: SmallVec<[Source; 4]> = match step {
            Step::Program(shape) => shape.inputs.iter().copied().collect(),
            Step::Between(at) => recipe.between[*at].how.sources(),
        };
        for source in sources {
            let place = *at.entry(source).or_insert(uses.len());
            match uses.get_mut(place) {
                Some((_, last)) => *last = number,
                None => uses.push((source, number)),
            }
        }
    }
    // A result is there before the step that needs it first, and all else before the first step.
    let is_later = |(source, last): &(Source, usize)| match source {
        Source::Result(_) => true,
        _ => *last > 0,
    };
    let mut held: Vec<(usize, Source)> =
        uses.into_iter().filter(is_later).map(|(source, last)| (last, source)).collect();
    held.sort_by_key(|(last, _)| std::cmp::Reverse(*last));
    held
}
