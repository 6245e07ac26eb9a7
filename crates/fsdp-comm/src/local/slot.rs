//! A place where one thread lends a slice to others for the duration of a closure.
//!
//! Readers hold a read lock while they use the slice, and the end of the loan takes the write lock.
//! So the lender neither goes on nor unwinds while another thread still reads its memory.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

/// A place for one loan at a time.
#[derive(Debug, Default)]
pub(super) struct Slot {
    lent: RwLock<Option<LentSlice>>,
}

/// The slice that is lent, and the round for which it is.
#[derive(Debug)]
struct LentSlice {
    round: u64,
    start: *const u8,
    len: usize,
}

// SAFETY: `start` and `len` are those of a `&[u8]`, which may go to and be shared with other
// threads.
unsafe impl Send for LentSlice {}
// SAFETY: as above.
unsafe impl Sync for LentSlice {}

impl Slot {
    /// Lends `bytes` for one round. Other threads may borrow them while `during` runs. Waits at the
    /// end until nobody reads them any more.
    pub(super) fn lend<R>(&self, round: u64, bytes: &[u8], during: impl FnOnce() -> R) -> R {
        let _loan_end = LoanEnd(self);
        self.set(Some(LentSlice {
            round,
            start: bytes.as_ptr(),
            len: bytes.len(),
        }));
        during()
    }

    /// Begins or ends a loan. Waits until nobody reads the slice of the one before.
    fn set(&self, lent: Option<LentSlice>) {
        *self.lent.write().unwrap_or_else(PoisonError::into_inner) = lent;
    }

    /// Borrows the slice that is lent for this round; `None` if that loan has not begun or has
    /// ended.
    ///
    /// This never waits. If the lock is taken for writing, the lender is taking the slice back.
    pub(super) fn borrow(&self, round: u64) -> Option<Loan<'_>> {
        let lent = self.lent.try_read().ok()?;
        match &*lent {
            Some(current) if current.round == round => Some(Loan(lent)),
            _ => None,
        }
    }
}

/// A guard that ends the loan of a slot on every way out of [`Slot::lend`].
struct LoanEnd<'a>(&'a Slot);

impl Drop for LoanEnd<'_> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

/// A borrowed slice. The thread that lends it waits until this is dropped.
#[derive(Debug)]
pub(super) struct Loan<'a>(RwLockReadGuard<'a, Option<LentSlice>>);

impl Loan<'_> {
    /// Returns the bytes that are lent; none if there is no loan any more.
    pub(super) fn bytes(&self) -> &[u8] {
        match &*self.0 {
            // SAFETY: the pointer and length are those of a slice that `lend` was given, borrowed
            // until `lend` returns or unwinds. Before either it takes the write lock, which it
            // cannot get while this holds the read lock. It was given a shared slice, so nobody
            // writes to it meanwhile. The result lives no longer than `self`.
            Some(lent) => unsafe { std::slice::from_raw_parts(lent.start, lent.len) },
            None => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_loan_lasts_as_long_as_the_closure() {
        let slot = Slot::default();
        assert!(slot.borrow(0).is_none());
        slot.lend(1, b"bytes", || {
            assert_eq!(slot.borrow(1).unwrap().bytes(), b"bytes");
            assert!(slot.borrow(0).is_none() && slot.borrow(2).is_none());
        });
        assert!(slot.borrow(1).is_none());
    }

    #[test]
    fn a_lender_that_panics_waits_for_its_readers() {
        let slot = Slot::default();
        let done_reading = AtomicBool::new(false);
        let lending = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let panic = catch_unwind(AssertUnwindSafe(|| {
                    let bytes = vec![7; 1 << 16];
                    slot.lend(0, &bytes, || {
                        lending.wait();
                        lending.wait();
                        panic!("the lender gives up");
                    })
                }));
                assert!(panic.is_err());
                assert!(
                    done_reading.load(Ordering::SeqCst),
                    "the slice was freed while it was read"
                );
            });
            lending.wait();
            let loan = slot.borrow(0).unwrap();
            lending.wait();
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(loan.bytes().iter().all(|&byte| byte == 7));
            done_reading.store(true, Ordering::SeqCst);
            drop(loan);
        });
        assert!(slot.borrow(0).is_none());
    }
}
