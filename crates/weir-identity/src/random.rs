//! Random numbers for keys, secrets and serial numbers: the kernel's. A simulation never makes any of these.

use ring::rand::{SecureRandom, SystemRandom};

/// The kernel gave no random bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the system gives no random numbers; is getrandom(2) forbidden here?")]
pub struct NoRandomness;

/// `N` random bytes.
pub(crate) fn bytes<const N: usize>() -> Result<[u8; N], NoRandomness> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| NoRandomness)?;
    Ok(bytes)
}
