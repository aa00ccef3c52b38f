//! Places that are counted for each node or client, so that none can take those of others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A number of places for each holder.
#[derive(Debug)]
pub struct Places {
    each: usize,
    taken: Mutex<BTreeMap<String, usize>>,
}

/// One of them, as long as it lives.
#[derive(Debug)]
pub struct Place {
    all: Arc<Places>,
    holder: String,
}

impl Places {
    /// So many for each holder.
    #[must_use]
    pub fn new(each: usize) -> Arc<Places> {
        Arc::new(Places { each, taken: Mutex::default() })
    }

    /// A place for `holder`; `None` if it has all of its own.
    #[must_use]
    pub fn take(self: &Arc<Places>, holder: &str) -> Option<Place> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.entry(holder.to_owned()).or_default();
        if *count >= self.each {
            return None;
        }
        *count += 1;
        Some(Place { all: Arc::clone(self), holder: holder.to_owned() })
    }

    /// Those that have at least one, by name.
    #[must_use]
    pub fn holders(&self) -> Vec<String> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.all.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.holder) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.holder);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_holder_has_places_of_its_own_and_gives_them_back() {
        let places = Places::new(2);
        let mut taken = vec![places.take("a").unwrap(), places.take("a").unwrap()];
        assert!(places.take("a").is_none());
        taken.push(places.take("b").unwrap());
        assert_eq!(places.holders(), ["a", "b"]);
        drop(taken);
        assert!(places.taken.lock().unwrap().is_empty());
    }
}
