//! A script that is run in variants, each once, and judged on slices.

use std::collections::BTreeMap;

use oxitorch_pjrt::Found;

use super::budget::{self, Limit};
use super::effort::Asked;
use super::fit::Argument;
use super::parallel::{self, Parallel, Strategy};
use super::remat::Policy;
use super::script::{Call, Runs, Told};
use super::slices::Slice;
use super::verdict::Judged;
use crate::facts::Facts;

/// How the script is run, if not as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Variant {
    /// How it is told another batch, if not by its mark, and the batch.
    pub(crate) batch: Option<(Option<Argument>, u64)>,
    /// What it computes again in its backward pass.
    pub(crate) remat: Option<Policy>,
    /// Whether it computes in bfloat16 where `torch.autocast` does.
    pub(crate) autocast: bool,
}

/// A slice, the memory of its devices, and what compiles for it.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) slice: &'a Slice,
    pub(crate) memory: u64,
    pub(crate) plugin: &'a Found,
}

/// The script, and what is known of it.
pub(crate) struct Session<'a> {
    pub(crate) script: &'a [String],
    pub(crate) places: Vec<Place<'a>>,
    /// Steps, and what is read where nothing was computed.
    pub(crate) call: (u64, f64),
    pub(crate) effort: Asked,
    pub(crate) budget: &'a [Limit],
    pub(crate) parallel: Option<&'a Parallel>,
    pub(crate) facts: &'a Facts,
    pub(crate) runs: BTreeMap<Variant, Runs<'a>>,
}

impl<'a> Session<'a> {
    /// Runs the script, if it was not run so before, and judges it on a slice. Gives what it tells of itself besides.
    pub(crate) fn judge(&mut self, place: Place<'_>, variant: &Variant) -> anyhow::Result<(Judged, Told)> {
        let how = (self.effort, self.parallel);
        self.judge_so(place, variant, how)
    }

    /// The same with another effort, and split in another way.
    pub(crate) fn judge_so(
        &mut self,
        place: Place<'_>,
        variant: &Variant,
        (effort, parallel): (Asked, Option<&Parallel>),
    ) -> anyhow::Result<(Judged, Told)> {
        let Session { script, places, call, facts, .. } = self;
        let runs = self.runs.entry(variant.clone()).or_insert_with(|| {
            let (script, batch) = match &variant.batch {
                Some((Some(argument), n)) => (argument.set(script, *n), None),
                Some((None, n)) => (script.to_vec(), Some(*n)),
                None => (script.to_vec(), None),
            };
            let slices = places.iter().map(|p| (p.slice, p.memory));
            let call = Call {
                steps: call.0,
                value: call.1,
                batch,
                remat: variant.remat,
                autocast: variant.autocast,
            };
            Runs::new(script, slices, call, facts)
        });
        let Place { slice, memory, .. } = place;
        let run = runs.of(slice, memory)?;
        let strategies = Parallel::strategies(parallel, slice.devices())?;
        let effort = (effort, budget::memory(self.budget, memory));
        let judge = |s: Option<&Strategy>| run.judge(place, &effort, s, self.facts);
        Ok((parallel::judge(&strategies, judge), run.told.clone()))
    }
}
