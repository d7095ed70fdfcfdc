//! The guest binary: guest-kernel below, guest-init above. Boots, collects
//! the trust keys from the boot archive, and serves one run.

#![no_std]
#![no_main]

use forge_guest_init::{LinkLost, Stream};
use forge_guest_kernel::vsock;
use forge_protocol::platform::archive;
use forge_protocol::signature::{TrustKey, TrustKeys};

forge_guest_kernel::main!(main);

fn main(boot_archive: &'static [u8]) -> ! {
    let keys = archive::entries(boot_archive)
        .filter(|(name, _)| name.starts_with(archive::TRUST_PREFIX))
        .map(|(name, content)| match content.try_into().map(TrustKey::from_bytes) {
            Ok(Ok(key)) => key,
            // The supervisor checked them; a guest without its keys is none.
            _ => panic!("{name} in the boot archive is no trust key"),
        });
    let mut trust = match TrustKeys::new(keys) {
        Ok(trust) => trust,
        Err(error) => panic!("the boot archive has {error}"),
    };
    if archive::entries(boot_archive).any(|(name, _)| name == archive::TABLES) {
        trust = trust.with_tables();
    }
    let link = Link { stream: vsock::Stream::take_over(), has_greeted: false };
    if let Err(error) = forge_guest_init::serve(link, &trust, forge_guest_kernel::ticks) {
        panic!("{error}");
    }
    forge_guest_kernel::exit()
}

struct Link {
    stream: vsock::Stream,
    has_greeted: bool,
}

impl Stream for Link {
    fn send(&mut self, bytes: &[u8]) -> Result<(), LinkLost> {
        self.stream.send(bytes).map_err(|vsock::Closed| LinkLost)
    }

    fn receive(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<(), LinkLost> {
        if !self.has_greeted {
            // The greeting is what is sent first, and this is the first wait.
            self.has_greeted = true;
            forge_guest_kernel::entry::touch();
        }
        self.stream.receive(take).map_err(|vsock::Closed| LinkLost)
    }

    fn instantiating(&mut self, is: bool) {
        // SAFETY: guest-init says this around wasmi's `Instance::new` alone,
        // which runs nothing of the program. The one large block in there that
        // is filled with zeros is a linear memory's buffer: wasmi allocates it
        // and fills it in the next statement (wasmi_core 2.0.0, pinned,
        // `ByteBuffer::new`). Tables are filled through their elements.
        unsafe { forge_guest_kernel::allocator::instantiating(is) }
    }
}
