//! The shares of a profile: one for each job.

use crate::record::{Class, Direction, Part, Profile};

/// Parts with less than this share of the requests get no job; their requests count as random.
pub(super) const SMALLEST_PART: f64 = 0.005;

/// The requests of one direction and class.
pub(super) struct Share {
    pub direction: Direction,
    pub class: Class,
    pub requests: f64,
    pub part: Part,
}

/// The parts that get a job. Small ones, and steps that are not regular enough, go to the random requests of their direction.
pub(super) fn shares(profile: &Profile) -> Vec<Share> {
    let all = profile.requests() as f64;
    let mut shares = Vec::new();
    for direction in Direction::ALL {
        let kind = profile.kind(direction);
        let mut random = Share {
            direction,
            class: Class::Random,
            requests: kind.random.requests as f64,
            part: kind.random.clone(),
        };
        for class in [Class::Sequential, Class::Strided] {
            let part = kind.part(class).clone();
            let requests = part.requests as f64;
            let fits = class == Class::Sequential || stride(profile, direction).is_some();
            if requests >= all * SMALLEST_PART && fits {
                shares.push(Share { direction, class, requests, part });
            } else {
                random.requests += requests;
                random.part.sizes.add(&part.sizes);
            }
        }
        if random.requests >= all * SMALLEST_PART {
            shares.push(random);
        }
    }
    shares
}

/// The step of most strided requests, if the load supports it: forward, and a multiple of the one size.
pub(super) fn stride(profile: &Profile, direction: Direction) -> Option<(u64, u64)> {
    let kind = profile.kind(direction);
    let &(distance, count) = kind.strides.first()?;
    let &(size, of_size) = kind.strided.sizes.0.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let distance = u64::try_from(distance).ok().filter(|&distance| distance > 0)?;
    let most = kind.strided.requests as f64 * 0.5;
    (count as f64 >= most && of_size >= most && distance.is_multiple_of(size)).then_some((distance, size))
}
