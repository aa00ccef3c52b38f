//! The choice of replicas, compared with an oracle that tries every set of nodes.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;

use proptest::prelude::*;
use weir_cluster::placement::{Live, choose_replicas, misplaced, spread};
use weir_cluster::records::{DiskRecord, Medium, MediumSpace, NodeRef, Policy, Source, Spread};

/// The owner, in every case.
const OWNER: &str = "n0";

#[derive(Clone, Debug)]
struct Case {
    policy: Policy,
    live: Live,
    present: Vec<String>,
    exclude: Vec<String>,
}

/// Up to seven nodes in up to three fault domains, some full, some busy; some already hold the log, some are excluded.
fn case() -> impl Strategy<Value = Case> {
    let node = (0_u8..3, prop::bool::weighted(0.8), 0_u64..6, 0_u8..6);
    let policy = prop::sample::select(Policy::all().collect::<Vec<_>>());
    (policy, prop::collection::vec(node, 1..8)).prop_map(|(policy, nodes)| {
        let (mut live, mut present, mut exclude) = (Live::new(), Vec::new(), Vec::new());
        for (number, (domain, room, load, role)) in nodes.into_iter().enumerate() {
            let mut node = common::node(&format!("n{number}"), 1);
            (node.fault_domain, node.load) = (format!("rack-{domain}"), load);
            node.media =
                vec![MediumSpace { medium: Medium::Ram, bytes: 10, free: if room { 2 } else { 1 }, log: 2 }];
            match role {
                0 if number > 0 && present.len() < policy.replicas() => present.push(node.name.clone()),
                1 => exclude.push(node.name.clone()),
                _ => {}
            }
            live.insert(node.name.clone(), node);
        }
        Case { policy, live, present, exclude }
    })
}

impl Case {
    fn chosen(&self) -> Vec<String> {
        let source = Source::File { name: "d".into() };
        let disk = DiskRecord::new("d", "v", source, 4096, 512, self.policy);
        let chosen = choose_replicas(&disk, OWNER, &self.present, &self.exclude, &self.live);
        chosen.into_iter().map(|node| node.node).collect()
    }

    fn domain(&self, node: &str) -> &str {
        &self.live[node].fault_domain
    }

    fn domains(&self, set: &[String]) -> usize {
        let all = set.iter().map(String::as_str).chain([OWNER]);
        all.map(|node| self.domain(node)).collect::<BTreeSet<_>>().len()
    }

    /// Whether the policy allows adding these.
    fn may_add(&self, added: &[String]) -> bool {
        let is_free = |name: &String| {
            name != OWNER
                && !self.present.contains(name)
                && !self.exclude.contains(name)
                && self.live[name].has_room(Medium::Ram)
        };
        let inside =
            |names: &[String]| names.iter().filter(|name| self.domain(name) == self.domain(OWNER)).count();
        let (here, new) = (inside(&self.present), inside(added));
        let fits = match self.policy {
            Policy::WriteThrough => added.is_empty(),
            Policy::WriteBack(most) => {
                added.len() + self.present.len() <= usize::from(most).max(self.present.len())
            }
            Policy::Strict(Spread { inside, outside }) => {
                new <= usize::from(inside).saturating_sub(here)
                    && added.len() - new <= usize::from(outside).saturating_sub(self.present.len() - here)
            }
        };
        fits && added.iter().all(is_free)
    }

    /// Every set of nodes that may be added.
    fn every_set(&self) -> Vec<Vec<String>> {
        let names: Vec<String> = self.live.keys().cloned().collect();
        let subset = |bits: u32| {
            let one = names.iter().enumerate().filter(move |(index, _)| bits >> index & 1 == 1);
            one.map(|(_, name)| name.clone()).collect::<Vec<_>>()
        };
        (0..1 << names.len()).map(subset).filter(|set| self.may_add(set)).collect()
    }
}

fn with(present: &[String], added: &[String]) -> Vec<String> {
    present.iter().chain(added).cloned().collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_other_set_is_better(case in case()) {
        let chosen = case.chosen();
        prop_assert!(case.may_add(&chosen), "{chosen:?}");
        let every = case.every_set();
        let most = every.iter().map(Vec::len).max().unwrap();
        prop_assert_eq!(chosen.len(), most, "as many as there can be");
        let largest = every.iter().filter(|set| set.len() == most);
        let spread = largest.map(|set| case.domains(&with(&case.present, set))).max().unwrap();
        prop_assert_eq!(case.domains(&with(&case.present, &chosen)), spread, "over as many domains");
    }

    /// Every other candidate in an equally good fault domain is at least as busy, to the nearest power of two.
    #[test]
    fn the_first_is_the_least_busy_of_the_best(case in case()) {
        let chosen = case.chosen();
        let Some(first) = chosen.first() else { return Ok(()) };
        let domains = |name: &String| case.domains(&with(&case.present, std::slice::from_ref(name)));
        let inside = |name: &String| case.domain(name) == case.domain(OWNER);
        for other in case.live.keys().filter(|name| case.may_add(std::slice::from_ref(name))) {
            let as_good = domains(other) > domains(first)
                || (domains(other) == domains(first) && inside(other) == inside(first));
            if as_good {
                let (first, other) = (case.live[first].load, case.live[other].load);
                prop_assert!(first < 2 * other.max(1), "{first} before {other}");
            }
        }
        let better = case.live.keys().filter(|name| case.may_add(std::slice::from_ref(name)));
        prop_assert!(better.map(domains).max().unwrap() == domains(first), "a new domain comes first");
    }

    #[test]
    fn chosen_nodes_are_never_misplaced_and_complete_the_set(case in case()) {
        let added = case.chosen();
        let processes = |names: &[String]| names.iter().map(|name| NodeRef::new(name.as_str(), 1)).collect::<Vec<_>>();
        let (before, after) = (processes(&case.present), processes(&with(&case.present, &added)));
        let wrong = misplaced(case.policy, OWNER, &before, &case.live);
        prop_assert_eq!(&wrong, &misplaced(case.policy, OWNER, &after, &case.live));
        if let Policy::Strict(wanted) = case.policy {
            let right = after.iter().map(|node| node.node.as_str()).filter(|node| !wrong.contains(node));
            let has = spread(OWNER, right, &case.live);
            prop_assert!(has.inside <= wanted.inside && has.outside <= wanted.outside);
        }
    }
}
