//! The protocol cores of a volume on a shared LUN (`VOLUME.md` §2): what a disk's owner may do on the LUN itself, and how the
//! coordinator changes a file's layout without taking blocks away under it.
//!
//! The coordinator alone touches the filesystem. It *grants* written, unshared blocks of a file to the owner of the disk, who reads
//! and writes them on the LUN. Whatever changes the layout goes through the coordinator, after the owner has given the blocks up:
//! by a redirected request, which gives up what it touches, or when it is asked to (*recall*).
//!
//! All sides are state machines `step(event) -> effects` without clock or I/O:
//!
//! - [`leases`]: what the owner holds of a file, by range;
//! - [`router`]: the owner's side, which chooses the route of each request;
//! - [`coordinator`]: the coordinator's side, for one file;
//! - [`claim`]: a node's way to be the coordinator of the volume, and from there.
//!
//! [`shell`] carries out what a claim wants of the LUN: with [`mod@filesystem`], [`heartbeat`], and [`fencing`]: by the LUN's
//! [`reservations`] or the operator's [`fence_command`].

mod admission;
mod children;
pub mod claim;
pub mod coordinator;
pub mod fence_command;
pub mod fencing;
pub mod filesystem;
pub mod heartbeat;
pub mod identity;
mod in_progress;
pub mod leases;
mod mkfs;
pub mod redirect;
mod request;
pub mod reservations;
pub mod route_status;
pub mod router;
pub mod serving;
pub mod setup;
mod setup_error;
pub mod shell;
pub mod survey;
