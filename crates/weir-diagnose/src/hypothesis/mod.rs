//! Hypotheses: possible causes of the cost of a step, or of the lowest layer. Each has its grounds, a predicted number, and
//! the run that decides.
//!
//! Everything here is pure: rows and counters come in. A hypothesis whose run is missing requests it ([`Hypothesis::asks`])
//! and is `open`; when the run is among the rows, its number supports or rejects the hypothesis. A hypothesis names the
//! cause; the verdict names the step that costs most, with the grade that the repeats allow.

mod hop;
mod lowest;
mod model;
mod order;
pub(crate) mod processor;
mod queue;
mod split;
mod variance;
mod view;

#[cfg(test)]
mod tests;

use crate::comparison::Comparisons;
use crate::result::Diagnosis;
use view::View;

pub use model::{Ask, Cause, Hypothesis, Predicted, Standing};

/// The hypotheses that the rows give grounds for.
#[must_use]
pub fn explain(diagnosis: &Diagnosis, compared: &Comparisons) -> Vec<Hypothesis> {
    let view = View { diagnosis, compared };
    let guesses = [
        variance::device(&view),
        processor::generator(&view),
        processor::node(&view),
        hop::slow_replica(&view),
        order::arrival_order(&view),
        queue::one_in_flight(&view),
        lowest::tier_exhausted(&view),
        lowest::throttled(&view),
        split::partial(&view),
        split::split(&view),
        hop::bandwidth(&view),
        hop::latency(&view),
    ];
    let mut guesses: Vec<Hypothesis> = guesses.into_iter().flatten().collect();
    if variance::is_wild(&view) {
        // Numbers that come true within such a scatter come true by chance. Time that was waited for a processor is counted.
        let by_rates = |guess: &&mut Hypothesis| !guess.cause.is_counted();
        for guess in guesses.iter_mut().filter(by_rates).filter(|guess| guess.standing == Standing::Supported)
        {
            guess.standing = Standing::Open;
            guess.grounds.push("The lowest layer varies too much for its run to decide.".to_owned());
        }
    }
    guesses
}

/// The hypothesis that a run has confirmed. Of several, the first in the order of [`Cause`].
#[must_use]
pub fn confirmed(hypotheses: &[Hypothesis]) -> Option<&Hypothesis> {
    let supported = hypotheses.iter().filter(|guess| guess.standing == Standing::Supported);
    supported.min_by_key(|guess| guess.cause)
}
