//! The order in which a model uses its units.

/// The order of units in one phase of a step, forward or backward. It is recorded in one step and
/// used for prefetching in the next.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The units in the order of the last complete phase.
    known_order: Vec<usize>,
    /// `true` if all ranks have the same order, `false` if they do not; `None` until they have
    /// compared their orders.
    is_same: Option<bool>,
    /// The units that the current phase has used so far.
    used_units: Vec<usize>,
    /// `true` while the current phase uses its units in the known order.
    follows_known_order: bool,
}

impl Order {
    /// Begins a phase.
    pub(super) fn begin(&mut self) {
        self.used_units.clear();
        self.follows_known_order = self.is_same == Some(true);
    }

    /// Returns the known order if the ranks have to compare it, before the next phase begins.
    pub(super) fn order_to_compare(&self) -> Option<&[usize]> {
        (self.is_same.is_none() && !self.known_order.is_empty()).then_some(&self.known_order)
    }

    /// Records the result of a comparison: `true` if all ranks have the same order.
    pub(super) const fn set_is_same(&mut self, is_same: bool) {
        self.is_same = Some(is_same);
    }

    /// Records that the phase uses a unit.
    pub(super) fn record_use(&mut self, unit: usize) {
        self.follows_known_order &= self.known_order.get(self.used_units.len()) == Some(&unit);
        self.used_units.push(unit);
    }

    /// Returns the units that the phase will probably use next; none if it has left the known
    /// order.
    pub(super) fn next_units(&self) -> &[usize] {
        if self.follows_known_order {
            &self.known_order[self.used_units.len()..]
        } else {
            &[]
        }
    }

    /// Ends a complete phase, and keeps its order for the next step. A phase that used no unit is
    /// ignored.
    pub(super) fn learn(&mut self) {
        if !self.used_units.is_empty() && self.used_units != self.known_order {
            self.known_order = std::mem::take(&mut self.used_units);
            self.is_same = None;
        }
        self.used_units.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(order: &mut Order, units: &[usize]) -> Vec<Vec<usize>> {
        order.begin();
        let predictions = units.iter().map(|&unit| {
            order.record_use(unit);
            order.next_units().to_vec()
        });
        let predictions = predictions.collect();
        order.learn();
        predictions
    }

    #[test]
    fn an_order_is_followed_once_all_ranks_have_the_same() {
        let mut order = Order::default();
        assert_eq!(order.order_to_compare(), None);
        assert!(pass(&mut order, &[0, 2, 1]).concat().is_empty());
        assert_eq!(order.order_to_compare(), Some(&[0, 2, 1][..]));
        // Before the comparison nobody follows it.
        assert!(pass(&mut order, &[0, 2, 1]).concat().is_empty());
        order.set_is_same(true);
        assert_eq!(order.order_to_compare(), None);
        assert_eq!(pass(&mut order, &[0, 2, 1]), [vec![2, 1], vec![1], vec![]]);
    }

    #[test]
    fn a_phase_that_leaves_the_order_gets_nothing_more_and_is_learned() {
        let mut order = Order::default();
        pass(&mut order, &[0, 1, 2, 3]);
        order.set_is_same(true);
        assert_eq!(
            pass(&mut order, &[0, 2, 3]),
            [vec![1, 2, 3], vec![], vec![]]
        );
        assert_eq!(order.order_to_compare(), Some(&[0, 2, 3][..]));
        order.set_is_same(false);
        assert!(pass(&mut order, &[0, 2, 3]).concat().is_empty());
        assert_eq!(order.order_to_compare(), None, "it has been compared");
        pass(&mut order, &[]);
        assert_eq!(
            order.known_order,
            [0, 2, 3],
            "a phase without units says nothing"
        );
        // Longer than known.
        pass(&mut order, &[0, 2, 3, 1]);
        assert_eq!(order.known_order, [0, 2, 3, 1]);
    }
}
