//! The order of the calls on GPU memory in a step: ranks that have found that they all made the
//! same calls need not agree on each of them again in the next step.

use crate::ballot::Ballot;
use crate::record::Call;

/// The largest number of calls that are recorded. A step of more calls gets no expected order.
const MAX_CALLS: usize = 1 << 16;

/// How a call relates to what all ranks expect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expectation {
    /// All ranks expect this call now.
    Expected,
    /// All ranks expect another call now. From here on this rank expects none.
    Left,
    /// Nothing is expected.
    Unknown,
}

/// The calls of a step so far, and those that all ranks expect.
#[derive(Debug, Default)]
pub(crate) struct CallOrder {
    /// `true` once a step has begun. Before, nothing is recorded: a program that never begins a
    /// step would record without end.
    is_recorded: bool,
    /// The hashes of the calls of the step before, if all ranks have made the same; else none.
    expected: Vec<u128>,
    /// The hashes of the calls of this step so far.
    made: Vec<u128>,
    /// `true` while the calls of this step are the expected ones.
    is_followed: bool,
}

impl CallOrder {
    /// Begins a step. If `is_same`, all ranks have found that they made the same calls in the step
    /// before, and expect them again.
    pub(crate) fn begin_step(&mut self, is_same: bool) {
        let last = std::mem::take(&mut self.made);
        self.is_followed = is_same && self.is_recorded && !last.is_empty();
        self.expected = if self.is_followed { last } else { Vec::new() };
        self.is_recorded = true;
    }

    /// Returns `true` while the calls of this step are those that all ranks expect.
    pub(crate) const fn is_followed(&self) -> bool {
        self.is_followed
    }

    /// Records a call.
    pub(crate) fn record(&mut self, call: &Call) -> Expectation {
        // A program may make calls without end after it has begun its last step.
        if !self.is_followed && self.made.len() >= MAX_CALLS {
            *self = CallOrder::default();
        }
        if !self.is_recorded {
            return Expectation::Unknown;
        }
        // A call has another number in each step.
        let numberless = Call {
            sequence: 0,
            ..call.clone()
        };
        let hash = Ballot::new(&numberless).hash;
        let expected = self.expected.get(self.made.len());
        let expectation = match self.is_followed {
            true if expected == Some(&hash) => Expectation::Expected,
            true => Expectation::Left,
            false => Expectation::Unknown,
        };
        self.is_followed = expectation == Expectation::Expected;
        self.made.push(hash);
        expectation
    }

    /// Returns a hash of the calls of this step so far.
    pub(crate) fn hash(&self) -> u64 {
        // Half of a good hash is one.
        Ballot::new(&self.made).hash as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Operation;

    /// Records calls of these sizes.
    fn record(order: &mut CallOrder, sizes: &[usize]) -> Vec<Expectation> {
        let mut expectations = Vec::new();
        for (sequence, &size) in (0..).zip(sizes) {
            let call = Call {
                sequence,
                sizes: vec![size],
                ..Call::new(Operation::AllGather)
            };
            expectations.push(order.record(&call));
        }
        expectations
    }

    use Expectation::{Expected, Left, Unknown};

    #[test]
    fn calls_are_expected_once_all_ranks_have_made_them_in_a_step() {
        let mut order = CallOrder::default();
        assert_eq!(record(&mut order, &[1, 2]), [Unknown; 2]);
        // What came before the first step is not known.
        order.begin_step(true);
        assert_eq!(record(&mut order, &[1, 2]), [Unknown; 2]);
        order.begin_step(true);
        assert_eq!(record(&mut order, &[1, 2]), [Expected; 2]);
        order.begin_step(false);
        assert_eq!(record(&mut order, &[1, 2]), [Unknown; 2]);
    }

    #[test]
    fn a_step_leaves_the_order_once_and_the_next_one_expects_its_calls() {
        let mut order = CallOrder::default();
        order.begin_step(false);
        record(&mut order, &[1, 2, 3]);
        order.begin_step(true);
        let expectations = record(&mut order, &[1, 3, 3, 3]);
        assert_eq!(expectations, [Expected, Left, Unknown, Unknown]);
        order.begin_step(true);
        assert_eq!(
            record(&mut order, &[1, 3, 3, 3, 7]),
            [Expected, Expected, Expected, Expected, Left]
        );
    }

    #[test]
    fn a_step_of_too_many_calls_has_no_order() {
        let mut order = CallOrder::default();
        order.begin_step(false);
        record(&mut order, &vec![1; MAX_CALLS]);
        assert_eq!(order.made.len(), MAX_CALLS);
        record(&mut order, &[1, 1]);
        assert_eq!((order.made.len(), order.is_recorded), (0, false));
        order.begin_step(true);
        assert_eq!(record(&mut order, &[1]), [Unknown]);
        order.begin_step(true);
        assert_eq!(record(&mut order, &[1, 1]), [Expected, Left]);
    }

    #[test]
    fn the_hash_tells_orders_apart() {
        let mut orders = [
            CallOrder::default(),
            CallOrder::default(),
            CallOrder::default(),
        ];
        for (order, sizes) in orders.iter_mut().zip([[1, 2], [1, 2], [2, 1]]) {
            order.begin_step(false);
            record(order, &sizes);
        }
        let [first, same, other] = orders.map(|order| order.hash());
        assert_eq!(first, same);
        assert_ne!(first, other);
    }
}
