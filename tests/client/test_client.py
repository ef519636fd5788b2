from dspark.client import AsyncClient
from ..gateway.toy_front import front, expected, tokenizer
async def test_smoke():
    async with front() as f, AsyncClient(f.address) as c:
        got = await c.generate("Hello", temperature=0, max_tokens=30, return_prompt_ids=True)
        print(got)
        assert list(got.token_ids) == expected("Hello", 30)
        assert got.text == tokenizer().decode(got.token_ids)
        print(await c.model_info(), await c.count_tokens("abc"))
