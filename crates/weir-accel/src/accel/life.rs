//! The lifecycle of an accelerator on this node.

/// From its opening to its end. Nothing leads back from a later state to an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// It takes requests, and destages when that pays.
    Serving(Destaging),
    /// It destages everything at once, because the disk is to be closed here.
    Closing(Destaging),
    /// Another node owns the disk, and has the log: every request is refused, and nothing more is handed to the backing (P2, P4).
    Released,
}

/// Whether records may be handed to the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destaging {
    /// They may.
    Running,
    /// They may not: the disk is about to be handed over.
    Held,
}

impl Life {
    /// The state of an accelerator that has just been opened.
    pub(super) fn new() -> Life {
        Life::Serving(Destaging::Running)
    }

    /// The disk is to be closed here.
    pub(super) fn close(&mut self) {
        if let Life::Serving(destaging) = *self {
            *self = Life::Closing(destaging);
        }
    }

    /// Another node owns the disk. Whether this is news.
    pub(super) fn release(&mut self) -> bool {
        std::mem::replace(self, Life::Released) != Life::Released
    }

    /// Destage is held, or goes on.
    pub(super) fn hold_destage(&mut self, held: bool) {
        if let Life::Serving(destaging) | Life::Closing(destaging) = self {
            *destaging = if held { Destaging::Held } else { Destaging::Running };
        }
    }

    pub(super) fn is_closing(self) -> bool {
        matches!(self, Life::Closing(_))
    }

    pub(super) fn is_released(self) -> bool {
        self == Life::Released
    }

    /// Whether records may be handed to the backing.
    pub(super) fn may_destage(self) -> bool {
        matches!(self, Life::Serving(Destaging::Running) | Life::Closing(Destaging::Running))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destage_that_is_held_stays_held_while_the_disk_is_closed() {
        let mut life = Life::new();
        assert!(life.may_destage() && !life.is_closing());
        life.hold_destage(true);
        life.close();
        assert!(life.is_closing() && !life.may_destage());
        life.hold_destage(false);
        assert!(life.is_closing() && life.may_destage());
    }

    #[test]
    fn nothing_leads_back_from_a_disk_that_was_released() {
        let mut life = Life::new();
        assert!(life.release() && !life.release());
        life.close();
        life.hold_destage(false);
        assert!(life.is_released() && !life.is_closing() && !life.may_destage());
    }
}
