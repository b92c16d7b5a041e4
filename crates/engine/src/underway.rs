//! What is noted of a collective while it goes on: for metrics, timelines and the flight recorder.

use crate::events::What;
use crate::flight::Entry;
use crate::metrics::Metrics;
use crate::site::Site;
use crate::value::Value;
use crate::work::{About, Lane};
use std::sync::Arc;
use std::time::Instant;

/// A collective in which this process is.
pub(crate) struct Underway {
    metrics: Arc<Metrics>,
    about: About,
    /// It with its tensors.
    call: String,
    device: u16,
    lane: Lane,
    site: Site,
    /// Of what it reads, or of what it writes if that is more.
    bytes: u64,
    start: Instant,
    entry: Option<Entry>,
}

impl Underway {
    pub(crate) fn begin<'a>(
        metrics: &Arc<Metrics>,
        about: &About,
        (device, lane): (usize, Lane),
        site: Site,
        reads: impl Iterator<Item = &'a Arc<Value>> + Clone,
        writes: impl Iterator<Item = &'a Arc<Value>> + Clone,
    ) -> Underway {
        let sum = |bytes: u64, value: &Arc<Value>| bytes + value.whole_bytes();
        let bytes = reads.clone().fold(0, sum).max(writes.clone().fold(0, sum));
        // A rank that only sends has no results.
        let only_reads = writes.clone().next().is_none();
        let named = writes.chain(reads.filter(move |_| only_reads));
        let call = about.call(named.map(|v| &v.ty));
        let entry = metrics.flight.begin(about, &call, site);
        let (metrics, about, device) = (metrics.clone(), about.clone(), device as u16);
        Underway { metrics, about, call, device, lane, site, bytes, start: Instant::now(), entry }
    }

    /// It is done, or has failed.
    pub(crate) fn end(self, failed: bool) {
        let Underway { metrics, about, call, device, lane, site, bytes, start, entry } = self;
        metrics.flight.end(entry, failed);
        metrics.collective(about.name, bytes, start.elapsed());
        metrics.events.add(start, || What::Collective { device, lane, about, call, bytes, site });
    }
}
