//! Bugs that the simulator plants in protocol cores, to show that its checks find them.

/// The bug `B` that is planted in a core, if there is one.
///
/// A core asks [`Planted::has`] where the bug would be made. Without the feature `planted-bugs` nothing can be planted, this
/// takes no space, and the compiler removes the questions.
#[derive(Clone, Copy, Debug)]
pub struct Planted<B> {
    #[cfg(feature = "planted-bugs")]
    bug: Option<B>,
    #[cfg(not(feature = "planted-bugs"))]
    bug: std::marker::PhantomData<B>,
}

impl<B> Default for Planted<B> {
    fn default() -> Planted<B> {
        Planted { bug: Default::default() }
    }
}

impl<B: Copy + PartialEq> Planted<B> {
    /// This bug, or none.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub const fn new(bug: Option<B>) -> Planted<B> {
        Planted { bug }
    }

    /// Whether it is this bug.
    #[must_use]
    #[inline]
    pub fn has(self, bug: B) -> bool {
        #[cfg(feature = "planted-bugs")]
        return self.bug == Some(bug);
        #[cfg(not(feature = "planted-bugs"))]
        {
            let _ = (self.bug, bug);
            false
        }
    }
}
