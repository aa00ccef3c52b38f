//! NBD as one of the exports of a disk.

use weir_block::{Completion, Event, Layer, LayerMeter, Nanos, OwnerId, Reactor};

use super::disk::NbdDisk;
use crate::export::Export;
use crate::limit::{Delays, Rate};
use crate::workspace::Workspace;

impl Export for NbdDisk {
    fn owner(&self) -> OwnerId {
        NbdDisk::owner(self)
    }

    fn on_event(&mut self, event: &Event) {
        NbdDisk::on_event(self, event);
    }

    fn pump(&mut self, reactor: &mut Reactor, layer: &mut dyn Layer, workspace: &mut Workspace) {
        NbdDisk::pump(self, reactor, layer, workspace);
    }

    fn complete(&mut self, completion: Completion) {
        NbdDisk::complete(self, completion);
    }

    fn flush(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        NbdDisk::flush(self, reactor, workspace);
    }

    fn has_more(&self) -> bool {
        NbdDisk::has_more(self)
    }

    fn is_waiting(&self) -> bool {
        NbdDisk::is_waiting(self)
    }

    fn deadline(&self, layer: &dyn Layer, reactor: &Reactor, workspace: &Workspace) -> Nanos {
        NbdDisk::deadline(self, layer, reactor, workspace)
    }

    fn set_rate(&mut self, rate: Option<Rate>, now: Nanos) {
        NbdDisk::set_rate(self, rate, now);
    }

    fn delays(&self) -> Delays {
        NbdDisk::delays(self)
    }

    fn hold(&mut self) {
        NbdDisk::hold(self);
    }

    fn is_held(&self) -> bool {
        NbdDisk::is_held(self)
    }

    fn resume(&mut self) {
        NbdDisk::resume(self);
    }

    fn dismiss(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        NbdDisk::dismiss(self, reactor, workspace);
    }

    fn close(&mut self) {
        NbdDisk::close(self);
    }

    fn keep_via(&mut self, node: Option<&str>, reactor: &mut Reactor, workspace: &mut Workspace) {
        NbdDisk::keep_via(self, node, reactor, workspace);
    }

    fn abort(&mut self, reactor: &mut Reactor, workspace: &mut Workspace) {
        NbdDisk::abort(self, reactor, workspace);
    }

    fn clients(&self) -> usize {
        self.connections()
    }

    fn meter(&self) -> LayerMeter {
        NbdDisk::meter(self)
    }
}
