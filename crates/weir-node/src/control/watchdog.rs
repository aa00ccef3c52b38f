//! Looks at whether the shards turn, and tells when one does not.

use std::sync::Arc;
use std::time::Duration;

use weir_block::Nanos;

use super::node::Node;
use crate::shard::health::Look;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(250);

/// The shortest time between two equal reports about a shard.
const AGAIN: Duration = Duration::from_secs(60);

/// The last reports about one shard.
#[derive(Clone, Debug, Default)]
struct Told {
    /// It hangs, and that was reported or suppressed.
    hangs: bool,
    hung_at: Option<Nanos>,
    spins: u64,
    spun_at: Option<Nanos>,
}

impl Told {
    /// A new report about the shard, if any.
    fn news(&mut self, number: usize, look: &Look, now: Nanos) -> Option<(&'static str, String)> {
        let quiet = |at: Option<Nanos>| at.is_some_and(|at| now - at < AGAIN);
        let hangs = look.hangs.is_some();
        let begins = hangs && !std::mem::replace(&mut self.hangs, hangs);
        self.hangs = hangs;
        if let Some(lasts) = look.hangs.filter(|_| begins && !quiet(self.hung_at)) {
            self.hung_at = Some(now);
            let disk = if look.disk.is_empty() {
                String::new()
            } else {
                format!(" in the turn of disk {}", look.disk)
            };
            let text =
                format!("shard {number} hangs{disk} for {lasts:.1?} so far; all its disks stand still");
            return Some(("shard-hangs", text));
        }
        let spins = std::mem::replace(&mut self.spins, look.spins) < look.spins;
        if spins && !quiet(self.spun_at) {
            self.spun_at = Some(now);
            let text = format!("shard {number} spins: turns that do nothing, one after the other");
            return Some(("shard-spins", text));
        }
        None
    }
}

/// Watches the shards until the node stops.
pub async fn watch(node: Arc<Node>) {
    let mut looks = weir_task::interval(PAUSE);
    let mut told = Vec::new();
    loop {
        looks.tick().await;
        let health = node.shards.health();
        told.resize(health.len(), Told::default());
        let now = Nanos::now();
        for (number, (look, told)) in health.iter().zip(&mut told).enumerate() {
            if let Some((kind, text)) = told.news(number, look, now) {
                node.journal.tell(kind, &node.config.name, text);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::health::Health;

    fn at(seconds: u64) -> Nanos {
        Nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn a_hang_is_told_once_and_not_again_within_a_minute() {
        let well = Health::default().look(at(1));
        let ill = Look { hangs: Some(Duration::from_millis(1300)), disk: "d7".into(), ..well.clone() };
        let mut told = Told::default();
        assert_eq!(told.news(0, &well, at(1)), None);
        let (kind, text) = told.news(0, &ill, at(2)).unwrap();
        assert!(kind == "shard-hangs" && text.contains("d7") && text.contains("1.3s"), "{text}");
        assert_eq!(told.news(0, &ill, at(3)), None);
        assert_eq!(told.news(0, &well, at(4)), None);
        assert_eq!(told.news(0, &ill, at(5)), None, "within a minute");
        assert_eq!(told.news(0, &well, at(60)), None);
        assert!(told.news(0, &ill, at(63)).is_some());
    }

    #[test]
    fn spinning_is_told_when_it_is_found_and_not_again_within_a_minute() {
        let look = |spins: u64| Look { spins, ..Health::default().look(at(1)) };
        let mut told = Told::default();
        assert_eq!(told.news(1, &look(0), at(1)), None);
        assert_eq!(told.news(1, &look(3), at(2)).unwrap().0, "shard-spins");
        assert_eq!(told.news(1, &look(9), at(3)), None);
        assert_eq!(told.news(1, &look(9), at(70)), None, "nothing new");
        assert_eq!(told.news(1, &look(10), at(71)).unwrap().0, "shard-spins");
    }
}
