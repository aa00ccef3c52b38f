//! Flash stores of logs that are no longer needed, until their last operation has ended.

use weir_accel::flash::FlashStore;
use weir_block::{Event, Reactor};

/// Retires a store whose log is no longer needed.
pub fn retire(retired: &mut Vec<FlashStore>, reactor: &mut Reactor, store: Option<FlashStore>) {
    retired.extend(store.and_then(|store| store.retire(reactor)));
}

/// Passes an event to a retired store, if it is for one.
pub fn retired_event(retired: &mut Vec<FlashStore>, reactor: &mut Reactor, event: Event) -> Option<Event> {
    let Some(index) = retired.iter().position(|store| store.owner() == event.token.owner) else {
        return Some(event);
    };
    let mut store = retired.swap_remove(index);
    store.on_event(event, reactor.now());
    retire(retired, reactor, Some(store));
    None
}
